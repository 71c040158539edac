import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="empty_ray_depth", title="Expected ray depth divides by the accumulated opacity: a ray that hits nothing has 0 / 0",
    source="ashawkey/torch-ngp#198; nerfstudio-project/nerfstudio#811", fidelity="direct",
    precision="bf16", phase="forward", cause="zero_over_zero", cause_alt=["div_by_zero"], op=["div"],
    module="model.render.depth", line="return (w * t).sum(-1) / w.sum(-1)",
    fix="Add 1e-10 to the accumulation (and use the background depth for empty rays).",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class DepthRenderer(nn.Module):
    def forward(self, w, t):
        return (w * t).sum(-1) / w.sum(-1)


class Render(nn.Module):
    def __init__(self):
        super().__init__()
        self.depth = DepthRenderer()

    def forward(self, sigma, t, dt):
        a = 1 - torch.exp(-sigma * dt)
        trans = torch.cumprod(torch.cat([torch.ones_like(a[:, :1]), 1 - a[:, :-1]], 1), 1)
        w = a * trans
        return self.depth(w, t), w.sum(-1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.render = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 1)), Render()

    def forward(self, o, d, t, occ):
        x = o[:, None] + d[:, None] * t[..., None]
        sigma = F.softplus(self.mlp(x).float()).squeeze(-1) * occ
        return self.render(sigma, t, 0.2)


class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Field()


def loss_fn(model, batch):
    o, d, t, occ, z = batch
    depth, acc = model.model(o, d, t, occ)
    return F.l1_loss(depth, z) + 0.01 * acc.mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        occ = (torch.rand(6, 8, generator=g) > 0.3).float()
        occ[:, 0] = 1.0
        if i == 3:
            occ[4] = 0.0  # the occupancy grid says: free space all along this ray
        batches.append((torch.randn(6, 3, generator=g), F.normalize(torch.randn(6, 3, generator=g), dim=-1), torch.linspace(0.5, 2, 8).repeat(6, 1), occ, torch.rand(6, generator=g) + 0.5))
    m = Pipeline()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
