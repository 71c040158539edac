import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="observer_never_ran",
    title=(
        "Fake quantisation is switched on before the observer saw data: min=inf, max=-inf make the range "
        "-inf and 0 * -inf"
    ),
    source="alibaba/TinyNeuralNetwork#375; pytorch/pytorch#100654 (observers left at min=inf, max=-inf)",
    fidelity="adapted",
    precision="fp32", phase="buffer", phase_alt=["forward"], cause="buffer_corrupted",
    cause_alt=["zero_times_inf", "inf_minus_inf"], op=["mul"],
    module="features.act_quant", line="q = torch.round(x / span * 255) * span / 255",
    fix="Run the observer (calibrate) before enabling fake quantisation.",
    recoverable_by=["fix_code"], step=0, loss_step=3, symptom="buffer",
)


class ActQuant(nn.Module):
    def __init__(self):
        super().__init__()
        self.enabled = False
        self.observing = False
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))

    def forward(self, x):
        if self.observing:
            self.min_val.copy_(torch.minimum(self.min_val, x.detach().min()))
            self.max_val.copy_(torch.maximum(self.max_val, x.detach().max()))
        if not self.enabled:
            return x
        span = self.max_val - self.min_val
        q = torch.round(x / span * 255) * span / 255
        return x + (q - x).detach()


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 3, padding=1)
        self.act_quant = ActQuant()

    def forward(self, x):
        return self.act_quant(F.relu(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Features()
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.features(x).mean(-1))


def loss_fn(model, batch):
    x, y, qat = batch
    model.features.act_quant.enabled = qat
    return F.cross_entropy(model(x), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        batches.append((torch.randn(4, 2, 8, generator=g), torch.randint(0, 2, (4,), generator=g), i >= 3))
    model = Net()
    return model, torch.optim.SGD(model.parameters(), 0.05), batches, loss_fn
