import torch
import torch.nn as nn

CASE = dict(
    id="haversine_asin",
    title="Haversine geolocation loss: sin^2 + cos cos sin^2 of antipodal points rounds to just above 1, asin is NaN",
    source="own (great-circle loss); compare papagina/RotationContinuity#1",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="acos_asin_domain",
    op=["asin"],
    module="",
    line="return 2 * torch.asin(torch.sqrt(hav))",
    fix="hav.clamp(0, 1 - 1e-7) before the root.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=4,
    symptom="loss",
)


class Geo(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.offset = nn.Linear(16, 2)

    def forward(self, x, prior):
        return prior + 0.1 * self.offset(self.trunk(x))


def great_circle(p, q):
    lat = torch.stack([p[:, 0], q[:, 0]])
    dlat, dlon = (p - q).unbind(-1)
    hav = torch.sin(dlat / 2) ** 2 + lat.cos().prod(0) * torch.sin(dlon / 2) ** 2
    hav = hav * (1 + 4e-6) + 1e-6  # ellipsoid correction, and a floor for the root
    return 2 * torch.asin(torch.sqrt(hav))


def loss_fn(model, batch):
    x, prior, place = batch
    return great_circle(model(x, prior), place).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        x = torch.randn(5, 6, generator=g)
        prior = torch.rand(5, 2, generator=g) - 0.5
        place = prior + 0.3 * torch.randn(5, 2, generator=g)
        if i == 4:
            x[2] = 0.0
            prior[2] = torch.tensor([0.0, 0.0])
            place[2] = torch.tensor([0.0, torch.pi])  # longitude with the wrong sign convention
        batches.append((x, prior, place))
    m = Geo()
    with torch.no_grad():
        m.trunk[0].bias.zero_()
        m.offset.bias.zero_()
    return m, torch.optim.Adam(m.parameters(), 1e-5), batches, loss_fn
