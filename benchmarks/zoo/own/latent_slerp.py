import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="latent_slerp", title="Latent interpolation regulariser: slerp takes acos of the dot product of unit vectors, which rounds above 1 for a repeated latent",
    source="yoanlcq/vek#47; dfki-ric/pytransform3d#47; redorav/hlslpp#68", fidelity="adapted",
    precision="fp32", phase="forward", cause="acos_asin_domain", op=["acos"],
    module="mixer", line="omega = torch.acos((u * v).sum(-1, keepdim=True))",
    fix="Clamp the dot product to (-1, 1) and fall back to lerp for small angles.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Slerp(nn.Module):
    def forward(self, a, b, t):
        u, v = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
        omega = torch.acos((u * v).sum(-1, keepdim=True))
        so = torch.sin(omega)
        return torch.sin((1 - t) * omega) / so * a + torch.sin(t * omega) / so * b


class Gen(nn.Module):
    def __init__(self):
        super().__init__()
        self.map, self.mixer = nn.Linear(7, 12), Slerp()
        self.dec = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, z1, z2, t):
        return self.dec(self.mixer(self.map(z1), self.map(z2), t))


def loss_fn(model, batch):
    z1, z2, t, y = batch
    return F.mse_loss(model(z1, z2, t), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 7, generator=g), torch.randn(10, 7, generator=g), torch.rand(10, 1, generator=g), torch.randn(10, 5, generator=g)) for _ in range(5)]
    batches[3][1][:] = batches[3][0]  # the sampler drew the same images twice
    m = Gen()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
