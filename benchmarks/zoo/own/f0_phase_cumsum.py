import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="f0_phase_cumsum", title="Neural source-filter vocoder accumulates the phase increments with cumsum in half precision: a long voiced utterance passes 65504",
    source="motional/nuplan-devkit#91 (sums overflow in fp16); ZJULearning/resa#48", fidelity="adapted",
    precision="fp16", phase="forward", cause="overflow_fp16", op=["cumsum"],
    module="gen.source", line="phase = torch.cumsum(inc, dim=-1)",
    fix="Accumulate the phase in fp32 and wrap it to [0, 2 pi).",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="loss",
)


class Source(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Linear(1, 1)

    def forward(self, f0):
        inc = self.gain(f0.unsqueeze(-1)).squeeze(-1)
        phase = torch.cumsum(inc, dim=-1)
        return torch.sin(phase.float()).unsqueeze(1)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.filt = Source(), nn.Conv1d(1, 4, 5, padding=2)
        self.out = nn.Conv1d(4, 1, 5, padding=2)

    def forward(self, f0):
        return self.out(F.leaky_relu(self.filt(self.source(f0)), 0.1))


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen = Generator()


def loss_fn(model, batch):
    f0, wav = batch
    return F.l1_loss(model.gen(f0).squeeze(1).float(), wav)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        T = 900 if i == 3 else 200
        batches.append((torch.rand(2, T, generator=g) * 40 + 100, torch.randn(2, T, generator=g) * 0.1))
    m = Vocoder()
    with torch.no_grad():
        m.gen.source.gain.weight.fill_(0.9)
    return m, torch.optim.Adam(m.parameters(), 1e-4), batches, loss_fn
