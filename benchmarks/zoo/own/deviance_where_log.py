import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="deviance_where_log",
    title="where(y > 0, y log(y / mu), 0): for y = 0 the unused log is -inf and its gradient 0 * inf reaches mu",
    source="google-deepmind/optax#473, #1786; skglm (scikit-learn-contrib/skglm#252)", fidelity="adapted",
    precision="fp32", phase="backward", phase_alt=["forward"], cause="zero_times_inf",
    cause_alt=["log_of_zero", "zero_over_zero"], op=["log", "mul", "div"],
    module="", line="term = torch.where(y > 0, y * torch.log(y / mu), torch.zeros_like(mu))",
    fix="torch.xlogy(y, y) - y * log(mu), or replace y by 1 inside the log where y is 0.",
    recoverable_by=["fix_code", "fix_data", "skip"], step=2, symptom="grad",
)


class Rate(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return F.softplus(self.net(x)).squeeze(-1)


def deviance(mu, y):
    term = torch.where(y > 0, y * torch.log(y / mu), torch.zeros_like(mu))
    return 2 * (term - y + mu).mean()


def loss_fn(model, batch):
    return deviance(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        y = torch.randint(1, 9, (10,), generator=g).float()
        if i >= 2:
            y[i] = 0.0                   # the first interval without any claim
        batches.append((torch.randn(10, 5, generator=g), y))
    m = Rate()
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
