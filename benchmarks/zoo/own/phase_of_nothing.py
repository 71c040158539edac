import torch, torch.nn as nn

CASE = dict(
    id="phase_of_nothing", title="Phase loss of a vocoder takes torch.angle of a spectrum that is almost 0: its squared magnitude underflows and the derivative is 0 / 0",
    source="pytorch/pytorch#96543", fidelity="analogue",
    precision="fp32", phase="backward", cause="zero_over_zero", cause_alt=["div_by_zero", "division_by_near_zero_norm"], op=["angle"],
    module="", line="torch.angle(torch.fft.rfft(wav))", fix="Weight the phase by the magnitude, or add an eps to the spectrum.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=2, symptom="grad",
)


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 16)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.net(x) * self.gain


def phase(wav):
    return torch.angle(torch.fft.rfft(wav))


def loss_fn(model, batch):
    x, level, target = batch
    return (phase(model(x) * level).cos() - target.cos()).square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Vocoder()
    batches = []
    for step in range(4):
        level = torch.ones(5, 1)
        if step == 2:
            level[3] = 1e-25
        batches.append((torch.randn(5, 6, generator=g), level, torch.randn(5, 9, generator=g)))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
