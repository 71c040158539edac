import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="lsq_step_backward",
    title=(
        "Hand-written quantiser backward divides by the saved step of each channel; a channel that was all 0 "
        "has step 0"
    ),
    source="own (learned step-size quantisation, dead channel)", fidelity="adapted",
    precision="fp32", phase="backward", cause="custom_backward_bug", cause_alt=["zero_over_zero", "div_by_zero"],
    op=["div"], module="blocks.quant.q", line="ratio = x / step",
    fix="Clamp the step in backward exactly as in forward.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        step = x.abs().amax(0) / 127
        ctx.save_for_backward(x, step)
        safe = step.clamp(min=1e-8)
        return torch.round(x / safe) * safe

    @staticmethod
    def backward(ctx, grad):
        x, step = ctx.saved_tensors
        ratio = x / step
        return grad * (1 - 0.01 * (ratio - torch.round(ratio)))


class Quantizer(nn.Module):
    def forward(self, x):
        return FakeQuant.apply(x)


class QuantBlock(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.fc = nn.Linear(i, o, bias=False)
        self.q = Quantizer()

    def forward(self, x, keep):
        return self.q(torch.tanh(self.fc(x)) * keep)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"stem": nn.Linear(6, 10), "quant": QuantBlock(10, 8)})
        self.out = nn.Linear(8, 3)

    def forward(self, x, keep):
        return self.out(self.blocks["quant"](torch.sigmoid(self.blocks["stem"](x)), keep))


def loss_fn(model, batch):
    x, keep, y = batch
    return F.cross_entropy(model(x, keep), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        keep = torch.ones(8)
        if i == 3:
            keep[5] = 0.0  # channel dropout
        batches.append((torch.randn(10, 6, generator=g), keep, torch.randint(0, 3, (10,), generator=g)))
    model = Net()
    return model, torch.optim.SGD(model.parameters(), 1e-3), batches, loss_fn
