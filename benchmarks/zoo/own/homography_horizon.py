import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="homography_horizon", title="A homography warps pixels on the horizon line: the homogeneous coordinate is 0, the sampling grid infinite and grid_sample NaN",
    source="xy-guo/MVSNet_pytorch#39; kornia/kornia#4267", fidelity="analogue",
    precision="fp32", phase="forward", cause="div_by_zero", cause_alt=["zero_over_zero"], op=["div"],
    module="warp", line="grid = p[..., :2] / p[..., 2:]", fix="Mask points with |z| < eps before the division.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=2, symptom="loss",
)


class Warp(nn.Module):
    def __init__(self):
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(3, 3))
        self.register_buffer("keep", torch.tensor([[1.0, 1, 1], [1, 1, 1], [0, 0, 0]]))

    def forward(self, img, h):
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, 5), torch.linspace(-1, 1, 5), indexing="ij")
        p = torch.stack([xs, ys, torch.ones_like(xs)], -1)
        p = torch.einsum("bij,hwj->bhwi", h + self.delta * self.keep, p)
        grid = p[..., :2] / p[..., 2:]
        return F.grid_sample(img, grid, align_corners=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.warp = Warp()
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, img, h):
        return self.out(self.warp(self.conv(img), h))


def loss_fn(model, batch):
    img, h, ref = batch
    return F.l1_loss(model(img, h), ref)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(4):
        h = torch.eye(3).repeat(4, 1, 1)
        h[:, :2, 2] += 0.1 * torch.randn(4, 2, generator=g)
        if step == 2:
            h[1, 2] = torch.tensor([0.0, 1.0, 1.0])
        batches.append((torch.rand(4, 1, 5, 5, generator=g), h, torch.rand(4, 1, 5, 5, generator=g)))
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
