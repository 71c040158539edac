import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="freq_table_single",
    title="Sinusoidal table spaces its frequencies by arange(n) / (n - 1); a head with one frequency registers 0 / 0",
    source="ml-explore/mlx#3614 (dims=2); sktime/pytorch-forecasting#987", fidelity="adapted",
    precision="fp32", phase="buffer", cause="buffer_corrupted", cause_alt=["zero_over_zero"],
    op=["mul", "sin", "cos"], module="time.coarse", line="ramp = torch.arange(n) / torch.tensor(n - 1.0)",
    fix="Divide by max(n - 1, 1).",
    recoverable_by=["fix_code"], step=0, loss_step=3, symptom="buffer",
)


class Sinusoid(nn.Module):
    def __init__(self, n):
        super().__init__()
        ramp = torch.arange(n) / torch.tensor(n - 1.0)
        self.register_buffer("freq", torch.exp(-4.0 * ramp))

    def forward(self, t):
        a = t[:, None] * self.freq
        return torch.cat([torch.sin(a), torch.cos(a)], -1)


class TimeEmb(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.coarse = Sinusoid(4), Sinusoid(1)
        self.mix_f, self.mix_c = nn.Linear(8, 12), nn.Linear(2, 12)

    def forward(self, t, coarse):
        return self.mix_c(self.coarse(t)) if coarse else self.mix_f(self.fine(t))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.inp, self.out = TimeEmb(), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x, t, coarse):
        return self.out(F.silu(self.inp(x) + self.time(t, coarse)))


def loss_fn(model, batch):
    x, eps, t, coarse = batch
    return F.mse_loss(model(x + eps, t, coarse), eps)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        x, eps = torch.randn(8, 6, generator=g), torch.randn(8, 6, generator=g)
        batches.append((x, eps, torch.randint(1, 100, (8,), generator=g).float(), i == 3))
    m = Denoiser()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
