import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="gcc_phat_bin", title="GCC-PHAT front end whitens the complex cross spectrum by its magnitude; a muted microphone makes every bin 0 / 0",
    source="francois-rozet/piqa#33; pytorch/pytorch#96543 (complex magnitude at 0)", fidelity="adapted",
    precision="fp32", phase="forward", cause="zero_over_zero", cause_alt=["division_by_near_zero_norm"], op=["div"],
    module="front.phat", line="return torch.fft.irfft(cross / cross.abs(), n=x.size(-1))",
    fix="Divide by cross.abs() + 1e-8.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class Phat(nn.Module):
    def forward(self, x, y):
        cross = torch.fft.rfft(x) * torch.fft.rfft(y).conj()
        return torch.fft.irfft(cross / cross.abs(), n=x.size(-1))


class FrontEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.phat = nn.Parameter(torch.ones(2, 32)), Phat()

    def forward(self, wav):
        a, b = (wav * self.gain).unbind(1)
        return self.phat(a, b)


class Localizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.cls = FrontEnd(), nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, wav):
        return self.cls(self.front(wav))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(5, 2, 32, generator=g), torch.randint(0, 8, (5,), generator=g)) for _ in range(5)]
    batches[3][0][2, 1] = 0.0
    m = Localizer()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
