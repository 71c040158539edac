import torch
import torch.nn as nn

CASE = dict(
    id="bce_multiline",
    title="Hand-written binary cross-entropy: a sigmoid rounds to exactly 1, log(1 - p) is -inf, times (1 - y) = 0",
    source="kornia/kornia#64; own (BCE by hand)",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="log_of_zero",
    cause_alt=["zero_times_inf"],
    op=["log", "mul"],
    module="",
    line="+ (1 - y) * torch.log(1 - p)",
    fix="Use F.binary_cross_entropy_with_logits.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=2,
    symptom="loss",
    seeds=[0],
)


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 1)
        self.deep = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x):
        return torch.sigmoid(self.wide(x) + self.deep(x)).squeeze(-1)


def weighted_bce(p, y, pos_weight):
    per_row = -(
        pos_weight * y * torch.log(p)
        + (1 - y) * torch.log(1 - p)
    )
    return per_row.mean()


def loss_fn(model, batch):
    x, y = batch
    return weighted_bce(model(x), y, pos_weight=3.0)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(16, 6, generator=g), torch.randint(0, 2, (16,), generator=g).float()) for _ in range(5)]
    m = Clicks()
    with torch.no_grad():
        m.wide.weight.copy_(m.wide.weight.abs())
    batches[2][0][9] = 40.0
    batches[2][1][9] = 1.0
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
