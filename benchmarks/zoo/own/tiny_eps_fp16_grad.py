import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="tiny_eps_fp16_grad",
    title=(
        "Unit-energy scaling x / (rms + 1e-7): an almost silent frame gives a slope of 1e6 that overflows in "
        "the fp16 layers"
    ),
    source="maxrmorrison/torchcrepe#5; philipperemy/deep-speaker#5 (normalising silent frames)", fidelity="adapted",
    precision="fp16", phase="backward", cause="overflow_fp16", cause_alt=["division_by_near_zero_norm"],
    op=["to_copy", "_to_copy", "to", "mm", "addmm", "linear", "div"],
    module="frame.gain", module_alt=["frame.analysis", "frame"], line="return x / (rms + 1e-7)",
    fix="Use a floor that matches the signal level (1e-3), or detach the gain.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="grad",
)


class UnitEnergy(nn.Module):
    def forward(self, x):
        x = x.float()
        rms = x.pow(2).mean(-1, keepdim=True).add(1e-20).sqrt()
        return x / (rms + 1e-7)


class Frame(nn.Module):
    def __init__(self):
        super().__init__()
        self.analysis = nn.Linear(16, 12, bias=False)
        self.gain = UnitEnergy()

    def forward(self, x):
        return self.gain(self.analysis(x))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame = Frame()
        self.synth = nn.Linear(12, 16)

    def forward(self, x):
        return self.synth(self.frame(x))


def loss_fn(model, batch):
    noisy, clean = batch
    return F.mse_loss(model(noisy).float(), clean, reduction="none").sum(-1).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(6, 16, generator=g), torch.randn(6, 16, generator=g)) for _ in range(5)]
    batches[3][0][2] *= 1e-6
    model = Denoiser()
    return model, torch.optim.SGD(model.parameters(), 0.01), batches, loss_fn
