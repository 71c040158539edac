import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="healthy_detached_ratio", title="Adaptive discriminator weight |g_rec| / |g_gan| is inf while the adversarial gradient is 0; it is clamped to 1e4 and multiplies an exact zero",
    source="CompVis/taming-transformers adaptive weight", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[], step=None,
)


class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 8)
        self.disc = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, x):
        return self.dec(self.enc(x))


def loss_fn(model, batch):
    x, gate = batch
    out = model(x)
    rec, gan = F.mse_loss(out, x), -gate * model.disc(out).mean()
    last = model.dec.weight
    g_rec, = torch.autograd.grad(rec, last, retain_graph=True)
    g_gan, = torch.autograd.grad(gan, last, retain_graph=True)
    weight = (g_rec.norm() / g_gan.norm()).clamp(0.0, 1e4).detach()
    return rec + 0.1 * weight * gan


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 8, generator=g), float(i >= 4)) for i in range(8)]  # the discriminator joins at step 4
    m = AE()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
