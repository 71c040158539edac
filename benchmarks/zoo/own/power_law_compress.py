import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="power_law_compress",
    title=(
        "Power-law compression mag ** 0.3 of the enhanced spectrogram: digital silence is 0 and the slope "
        "there infinite"
    ),
    source="speechbrain/speechbrain#181; YatingMusic/ddsp-singing-vocoders#9", fidelity="direct",
    precision="bf16", phase="backward", cause="sqrt_grad_at_zero", cause_alt=["zero_times_inf"], op=["pow"],
    module="enh.compress", line="return mag ** self.alpha",
    fix="(mag + 1e-6) ** 0.3.",
    recoverable_by=["skip", "fix_code"], step=4, symptom="grad",
)


class Compress(nn.Module):
    def __init__(self, alpha=0.3):
        super().__init__()
        self.alpha = alpha

    def forward(self, mag):
        return mag ** self.alpha


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10), nn.Sigmoid())
        self.compress = Compress()

    def forward(self, noisy):
        return self.compress(self.mask(noisy).float() * noisy)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enh = Enhancer()

    def forward(self, noisy):
        return self.enh(noisy)


def loss_fn(model, batch):
    noisy, clean = batch
    return F.l1_loss(model(noisy), clean ** 0.3)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(6, 10, generator=g) + 0.05, torch.rand(6, 10, generator=g)) for _ in range(6)]
    batches[4][0][3, 5:] = 0.0           # padded by the collate function
    m = Model()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
