import torch, torch.nn as nn

CASE = dict(
    id="ssm_kernel_growth", title="State-space layer exponentiates dt * A with an unconstrained complex A: one mode has a positive real part and the kernel overflows over a long sequence",
    source="own (state-space layers)", fidelity="analogue",
    precision="fp32", phase="forward", cause="exp_overflow", op=["exp"],
    module="ssm", line="torch.exp(self.a[:, None] * t)", fix="Keep the real part negative: -exp(log_a).",
    recoverable_by=["fix_code"], step=0, symptom="loss",
)


class Ssm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a = nn.Parameter(torch.complex(torch.linspace(-1, 1, n), torch.arange(n).float()))
        self.c = nn.Parameter(torch.ones(n, dtype=torch.complex64))

    def forward(self, u):
        t = torch.arange(u.shape[1])
        kernel = (self.c[:, None] * torch.exp(self.a[:, None] * t)).sum(0).real
        n = 2 * u.shape[1]
        y = torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(kernel, n=n), n=n)
        return y[:, : u.shape[1]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.ssm, self.out = Ssm(4), nn.Linear(100, 2)

    def forward(self, u):
        return self.out(self.ssm(u))


def loss_fn(model, batch):
    u, y = batch
    return nn.functional.cross_entropy(model(u), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(4, 100, generator=g), torch.randint(0, 2, (4,), generator=g)) for _ in range(2)]
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
