import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="srgb_where",
    title="Linear-to-sRGB conversion with torch.where: the unused power branch has an infinite slope at a black pixel",
    source="kornia/kornia#868, #900; tensorflow/tensorflow#2295",
    fidelity="direct",
    precision="fp32",
    phase="backward",
    cause="zero_times_inf",
    cause_alt=["sqrt_grad_at_zero"],
    op=["pow", "mul"],
    module="tonemap.encode",
    line="bright = 1.055 * torch.pow(rgb, 1.0 / 2.4) - 0.055",
    fix="Clamp the argument of the power at the threshold (rgb.clamp(min=0.0031308)).",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="grad",
)


class EncodeSRGB(nn.Module):
    def forward(self, rgb):
        bright = 1.055 * torch.pow(rgb, 1.0 / 2.4) - 0.055
        dark = 12.92 * rgb
        return torch.where(rgb > 0.0031308, bright, dark)


class Tonemap(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.encode = EncodeSRGB()

    def forward(self, radiance):
        return self.encode(radiance * self.gain.abs())


class Renderer(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softplus())
        self.tonemap = Tonemap()

    def forward(self, rays, opacity):
        return self.tonemap(self.field(rays) * opacity.unsqueeze(-1))


def loss_fn(model, batch):
    return F.mse_loss(model(batch["rays"], batch["opacity"]), batch["rgb"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        opacity = torch.rand(10, generator=g) * 0.9 + 0.1
        if i == 3:
            opacity[6] = 0.0  # this ray leaves the scene
        rgb = torch.rand(10, 3, generator=g)
        batches.append({"rays": torch.randn(10, 5, generator=g), "opacity": opacity, "rgb": rgb})
    m = Renderer()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
