import torch
import torch.nn as nn

CASE = dict(
    id="rescale_half_grad",
    title="Head output is divided by a tiny unit in half precision: the forward fits, the gradient does not",
    source="facebookresearch/fairseq#2384 (gradient overflow in fp16); own",
    fidelity="adapted",
    precision="fp16",
    phase="backward",
    cause="overflow_fp16",
    op=["div"],
    module="readout.to_si",
    line="return x / self.unit",
    fix="Predict in normalised units (or do the unit conversion in fp32).",
    recoverable_by=["skip", "fp32", "fix_code", "fix_data"],
    step=3,
    symptom="grad",
)


class Unit(nn.Module):
    def __init__(self, unit):
        super().__init__()
        self.unit = unit

    def forward(self, x):
        return x / self.unit


class Readout(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 1)
        self.to_si = Unit(0.0001)

    def forward(self, h):
        return self.to_si(self.fc(h)).squeeze(-1)


class Surrogate(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.readout = Readout()

    def forward(self, x):
        return self.readout(self.net(x))


def loss_fn(model, batch):
    x, y = batch
    return 0.5 * (model(x).float() - y).pow(2).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 5, generator=g), torch.randn(8, generator=g)) for _ in range(5)]
    batches[3][1][2] = 900.0  # a measurement in the wrong unit
    m = Surrogate()
    with torch.no_grad():
        m.readout.fc.weight.mul_(1e-4)
        m.readout.fc.bias.zero_()
    return m, torch.optim.SGD(m.parameters(), 1e-12), batches, loss_fn
