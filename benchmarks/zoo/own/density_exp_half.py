import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="density_exp_half", title="Radiance field uses exp as its density activation in half precision: a pre-activation above 11 is inf",
    source="nerfstudio-project/nerfstudio#104; dreamgaussian/dreamgaussian#36", fidelity="adapted",
    precision="fp16", phase="forward", cause="exp_overflow", cause_alt=["overflow_fp16"], op=["exp"],
    module="field.density.act", line="return torch.exp(x)",
    fix="Truncated exp in fp32 (clamp the input to 11 or so), or softplus.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="loss",
)


class ExpAct(nn.Module):
    def forward(self, x):
        return torch.exp(x)


class Density(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc, self.act = nn.Linear(d, 1), ExpAct()

    def forward(self, h):
        return self.act(self.fc(h)).squeeze(-1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.density, self.rgb = nn.Sequential(nn.Linear(3, 16), nn.ReLU()), Density(16), nn.Linear(16, 3)

    def forward(self, x):
        h = self.trunk(x)
        return self.density(h), torch.sigmoid(self.rgb(h))


class NeRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = Field()

    def forward(self, pts, dt):
        sigma, rgb = self.field(pts)
        a = 1 - torch.exp(-sigma.float() * dt)
        t = torch.cumprod(torch.cat([torch.ones_like(a[:, :1]), 1 - a + 1e-6], 1), 1)[:, :-1]
        w = a * t
        return (w[..., None] * rgb).sum(1), (sigma.float() * dt).mean()


def loss_fn(model, batch):
    pts, dt, target = batch
    rgb, opacity = model(pts, dt)
    return F.mse_loss(rgb.float(), target) + 1e-3 * opacity


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(6, 8, 3, generator=g), torch.full((6, 8), 0.1), torch.rand(6, 3, generator=g)) for _ in range(5)]
    m = NeRF()
    with torch.no_grad():
        m.field.density.fc.weight.abs_()
        m.field.trunk[0].weight.abs_()
    batches[3][0][4, 2] = 14.0  # a sample far outside the scene box
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
