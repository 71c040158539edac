import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="vq_ema_unused_code",
    title=(
        "EMA codebook without Laplace smoothing: a code that was never chosen has count 0, embed_avg / count "
        "is 0 / 0"
    ),
    source="rosinality/vq-vae-2-pytorch#72; ZhangXInFD/SpeechTokenizer#18; nadavbh12/VQ-VAE#11", fidelity="direct",
    precision="fp32", phase="buffer", cause="buffer_corrupted", cause_alt=["zero_over_zero"],
    op=["div"], module="vq", line="self.codes.copy_(self.sums / self.counts[:, None])",
    fix="Laplace-smooth the cluster sizes, or update only codes with a count above 0.",
    recoverable_by=["fix_code"], step=2, loss_step=3, symptom="buffer",
)


class EmaQuantizer(nn.Module):
    def __init__(self, k, d, warmup=2, decay=0.9):
        super().__init__()
        self.warmup = warmup
        self.decay = decay
        self.seen = 0
        self.register_buffer("codes", torch.randn(k, d))
        self.register_buffer("counts", torch.zeros(k))
        self.register_buffer("sums", torch.zeros(k, d))

    @torch.no_grad()
    def update(self, z, idx):
        hot = F.one_hot(idx, self.codes.size(0)).float()
        self.counts.lerp_(hot.sum(0), 1 - self.decay)
        self.sums.lerp_(hot.t() @ z, 1 - self.decay)
        self.seen += 1
        if self.seen > self.warmup:
            self.codes.copy_(self.sums / self.counts[:, None])

    def forward(self, z):
        idx = torch.cdist(z, self.codes).argmin(-1)
        q = self.codes[idx].clone()
        if self.training:
            self.update(z.detach(), idx)
        return z + (q - z).detach(), F.mse_loss(z, q)


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
        self.vq = EmaQuantizer(12, 4)
        self.dec = nn.Linear(4, 10)

    def forward(self, x):
        q, commit = self.vq(self.enc(x))
        return self.dec(q), commit


def loss_fn(model, batch):
    rec, commit = model(batch)
    return F.mse_loss(rec, batch) + 0.25 * commit


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randn(24, 10, generator=g) for _ in range(6)]
    model = VQVAE()
    with torch.no_grad():
        model.vq.codes[7] = 50.0  # far away from every encoder output
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
