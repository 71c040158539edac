import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="raw_polynomial",
    title="Polynomial trend features of an unscaled time index: a Unix timestamp to the fifth power overflows fp32",
    source="own (polynomial regression with raw timestamps gives NaN loss)",
    fidelity="adapted",
    precision="bf16",
    phase="forward",
    cause="overflow_any_precision",
    op=["pow", "mul"],
    module="trend.basis",
    line="return torch.stack([t ** k for k in range(self.degree + 1)], dim=-1)",
    fix="Scale the time index to [0, 1] before raising it to a power.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=4,
    symptom="loss",
)


class Basis(nn.Module):
    def __init__(self, degree):
        super().__init__()
        self.degree = degree

    def forward(self, t):
        return torch.stack([t ** k for k in range(self.degree + 1)], dim=-1)


class Trend(nn.Module):
    def __init__(self):
        super().__init__()
        self.basis = Basis(5)
        self.theta = nn.Parameter(torch.zeros(6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, t):
        return (self.basis(t) * self.theta * self.scale).sum(-1)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.trend = Trend()
        self.season = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, t, x):
        return self.trend(t) + self.season(x).squeeze(-1).float()


def loss_fn(model, batch):
    t, x, y = batch
    return F.l1_loss(model(t, x), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        t = torch.rand(9, generator=g) * 2 - 1
        if i == 4:
            t[3] = 1.7e9  # this file stores seconds since 1970
        batches.append((t, torch.randn(9, 4, generator=g), torch.randn(9, generator=g)))
    m = Forecaster()
    return m, torch.optim.SGD(m.parameters(), 1e-3), batches, loss_fn
