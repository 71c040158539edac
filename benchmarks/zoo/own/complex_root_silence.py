import torch, torch.nn as nn

CASE = dict(
    id="complex_root_silence", title="Speech enhancement compresses the complex spectrum with pow(0.5): a bin of exactly 0 has an infinite derivative",
    source="pytorch/pytorch#78903", fidelity="direct",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", op=["pow", "sqrt"],
    module="front", line="spec.pow(0.5)", fix="Compress the magnitude with an eps and keep the phase apart.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=2, symptom="grad",
)


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(9))

    def forward(self, wav):
        spec = torch.fft.rfft(wav) * self.gain
        return spec.pow(0.5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = Front()
        self.mask = nn.Linear(18, 9)

    def forward(self, wav):
        c = self.front(wav)
        m = torch.sigmoid(self.mask(torch.cat([c.real, c.imag], -1)))
        return m * c


def loss_fn(model, batch):
    noisy, clean = batch
    out = model(noisy)
    return (out.real - clean).square().mean() + out.imag.square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(4):
        wav = torch.randn(6, 16, generator=g)
        if step == 2:
            wav[5] = 0.0
        batches.append((wav, torch.randn(6, 9, generator=g)))
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
