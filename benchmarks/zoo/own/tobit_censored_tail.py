import torch, torch.nn as nn
from torch.distributions import Normal

CASE = dict(
    id="tobit_censored_tail", title="Censored regression takes the log of Normal.cdf: twenty deviations below the threshold the cdf is exactly 0",
    source="own (Tobit likelihoods)", fidelity="analogue",
    precision="fp32", phase="forward", cause="log_of_zero", op=["log"],
    module="lik", line="Normal(mu, s).cdf(self.limit).log()", fix="torch.special.log_ndtr.",
    recoverable_by=["fix_code", "skip"], step=2, symptom="loss",
)


class Tobit(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_s = nn.Parameter(torch.zeros(()))
        self.register_buffer("limit", torch.tensor(0.0))

    def forward(self, mu, y, censored):
        s = self.log_s.exp()
        below = Normal(mu, s).cdf(self.limit).log()
        inside = Normal(mu, s).log_prob(y)
        return -torch.cat([below[censored], inside[~censored]]).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.lik = Tobit()

    def forward(self, x, y, c):
        return self.lik(self.net(x).squeeze(-1), y, c)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    with torch.no_grad():
        m.net.weight.fill_(0.5)
    batches = []
    for step in range(4):
        x, y = torch.randn(8, 3, generator=g), torch.rand(8, generator=g)
        c = torch.arange(8) < 3
        if step == 2:
            x[1] = 20.0
        batches.append((x, y, c))
    return m, torch.optim.SGD(m.parameters(), 1e-3), batches, loss_fn
