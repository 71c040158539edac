import torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.utils import spectral_norm

CASE = dict(
    id="spectral_zero_init", title="Spectral norm on a zero-initialised residual branch: the weight is divided by sigma = u W v = 0",
    source="pytorch/pytorch#20192", fidelity="direct",
    precision="fp32", phase="forward", cause="zero_over_zero", cause_alt=["division_by_near_zero_norm"], op=["div"],
    module="disc.res.out", module_alt=["disc.res"], line="return x + self.out(F.leaky_relu(self.inp(x), 0.2))",
    fix="Do not zero-initialise a spectrally normalised layer (scale its output instead).",
    recoverable_by=["fix_code"], step=0, symptom="loss",
    crude_disagrees="the division runs in a pre-forward hook inside torch.nn.utils",
)


class Res(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.inp, self.out = spectral_norm(nn.Linear(d, d)), nn.Linear(d, d)
        nn.init.zeros_(self.out.weight)
        self.out = spectral_norm(self.out)

    def forward(self, x):
        return x + self.out(F.leaky_relu(self.inp(x), 0.2))


class Disc(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.res, self.head = nn.Linear(6, 12), Res(12), nn.Linear(12, 1)

    def forward(self, x):
        return self.head(self.res(self.stem(x)))


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen, self.disc = nn.Linear(4, 6), Disc()


def loss_fn(model, batch):
    real, z = batch
    return F.relu(1 - model.disc(real)).mean() + F.relu(1 + model.disc(model.gen(z))).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 6, generator=g), torch.randn(8, 4, generator=g)) for _ in range(4)]
    m = GAN()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
