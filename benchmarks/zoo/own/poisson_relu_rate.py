import torch, torch.nn as nn, torch.nn.functional as F
from torch.distributions import Poisson

CASE = dict(
    id="poisson_relu_rate", title="Count model with a ReLU rate: Poisson(0).log_prob of an observed click is log(0) = -inf",
    source="sktime/pytorch-forecasting#560; awslabs/gluonts#833", fidelity="adapted",
    precision="fp32", phase="forward", cause="log_of_zero", op=["xlogy", "log"],
    module="", line="nll = -Poisson(rate).log_prob(y)",
    fix="softplus instead of ReLU, plus a floor for the rate.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Rate(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return F.relu(self.net(x)).squeeze(-1)


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.rate = nn.Embedding(10, 4), Rate()

    def forward(self, u, shift):
        return self.rate(self.user(u) + shift)


def loss_fn(model, batch):
    u, shift, y = batch
    rate = model(u, shift)
    nll = -Poisson(rate).log_prob(y)
    return nll.mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randint(0, 10, (8,), generator=g), torch.zeros(8, 4), torch.randint(0, 4, (8,), generator=g).float()) for _ in range(5)]
    m = ClickModel()
    with torch.no_grad():
        m.rate.net[2].weight.abs_().neg_(); m.rate.net[2].bias.fill_(3.0); m.rate.net[0].weight.abs_()
        m.user.weight.mul_(0.2)
    batches[3][1][5] = 20.0
    batches[3][2][5] = 2.0
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
