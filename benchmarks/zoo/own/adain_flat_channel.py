import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="adain_flat_channel",
    title="AdaIN takes the root of the variance of a flat channel and adds eps outside the root",
    source="grey-eye/talking-heads#32; facebookresearch/fastMRI#139",
    fidelity="adapted",
    precision="fp32",
    phase="backward",
    cause="sqrt_grad_at_zero",
    op=["sqrt"],
    module="generator.adain",
    line="std = x.var(dim=(2, 3), keepdim=True).sqrt() + 1e-5",
    fix="sqrt(var + 1e-5).",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="grad",
)


class AdaIN(nn.Module):
    def forward(self, x, style):
        std = x.var(dim=(2, 3), keepdim=True).sqrt() + 1e-5
        scale, shift = style[:, :, None, None].chunk(2, 1)
        return scale * (x - x.mean((2, 3), keepdim=True)) / std + shift


class Generator(nn.Module):
    def __init__(self, c=6):
        super().__init__()
        self.conv1 = nn.Conv2d(1, c, 1)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)
        self.adain = AdaIN()  # one instance, used for both layers
        self.style1 = nn.Linear(4, 2 * c)
        self.style2 = nn.Linear(4, 2 * c)
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x, z):
        x = torch.tanh(self.adain(self.conv1(x), self.style1(z)))
        x = torch.tanh(self.adain(self.conv2(x), self.style2(z)))
        return self.out(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.2))
        self.generator = Generator()


def loss_fn(model, batch):
    photo, z = batch
    return F.l1_loss(model.generator(photo, model.mapping(z)), photo)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(2, 1, 8, 8, generator=g), torch.randn(2, 4, generator=g)) for _ in range(5)]
    batches[3][0][1] = 0.0  # a black frame
    m = Model()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
