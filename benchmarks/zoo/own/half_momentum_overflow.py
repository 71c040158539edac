import torch
import torch.nn as nn

CASE = dict(
    id="half_momentum_overflow",
    title="SGD with momentum on half parameters: each gradient fits, the momentum buffer sums beyond 65504",
    source="facebookresearch/fairscale#263 (optimizer arithmetic in fp16); own", fidelity="adapted",
    precision="fp32", phase="optimizer", cause="overflow_fp16", cause_alt=["optimizer_state_corrupted"],
    op=["add", "add_", "mul_", "mul"], module="calib",
    line="opt = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.95)",
    fix="Keep the momentum (and master weights) in fp32 or normalise the target units.",
    recoverable_by=["fp32", "clip", "fix_code"], step=2, symptom="weight",
)


class Calibration(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n, dtype=torch.float16))
        self.bias = nn.Parameter(torch.zeros(n, dtype=torch.float16))

    def forward(self, x):
        return x * self.gain.float() + self.bias.float()


class Sensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 5)
        self.calib = Calibration(5)

    def forward(self, x):
        return self.calib(torch.sigmoid(self.mix(x)))


def loss_fn(model, batch):
    x, pascal = batch
    return (model(x) - pascal).pow(2).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(16, 5, generator=g), torch.full((16, 5), 60000.0)) for _ in range(4)]
    model = Sensor()
    opt = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.95)
    return model, opt, batches, loss_fn
