import torch
import torch.nn as nn

CASE = dict(
    id="logcosh_outlier",
    title="Log-cosh regression loss evaluates cosh directly: an outlier target above 89 overflows fp32",
    source="own (log-cosh loss is inf for large errors)",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="exp_overflow",
    cause_alt=["overflow_any_precision"],
    op=["cosh"],
    module="criteria.main",
    line="return torch.log(torch.cosh(pred - target + 1e-12)).mean()",
    fix="Use x + softplus(-2x) - log(2).",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=2,
    symptom="loss",
)


class LogCosh(nn.Module):
    def forward(self, pred, target):
        return torch.log(torch.cosh(pred - target + 1e-12)).mean()


class Smooth(nn.Module):
    def forward(self, pred, target):
        return (pred[:, 1:] - pred[:, :-1]).abs().mean()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 10, batch_first=True)
        self.out = nn.Linear(10, 1)
        self.criteria = nn.ModuleDict({"main": LogCosh(), "smooth": Smooth()})

    def forward(self, x):
        return self.out(self.gru(x)[0]).squeeze(-1)


def loss_fn(model, batch):
    pred = model(batch["x"])
    parts = {name: crit(pred, batch["y"]) for name, crit in model.criteria.items()}
    return parts["main"] + 0.1 * parts["smooth"]


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [{"x": torch.randn(4, 6, 3, generator=g), "y": torch.randn(4, 6, generator=g)} for _ in range(5)]
    batches[2]["y"][1, 3] = 130.0
    m = Model()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
