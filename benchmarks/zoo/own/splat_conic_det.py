import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="splat_conic_det", title="Gaussian splatting inverts the projected 2x2 covariance by 1 / det without the low-pass term: a needle seen edge-on has determinant 0",
    source="aras-p/UnityGaussianSplatting#14; huggingface/gsplat.js#75", fidelity="adapted",
    precision="fp32", phase="forward", cause="div_by_zero", op=["reciprocal", "div"],
    module="render.project", line="inv = 1.0 / det",
    fix="Add the 0.3 pixel low-pass to the diagonal and skip splats with det == 0.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Project(nn.Module):
    def forward(self, sx, sy, rho):
        a, c = sx * sx, sy * sy
        b = rho * sx * sy
        det = a * c - b * b
        inv = 1.0 / det
        return c * inv, -b * inv, a * inv


class Render(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.project = Project()
        self.pos, self.logit = nn.Parameter(torch.rand(n, 2)), nn.Parameter(torch.zeros(n))
        self.log_s, self.rho = nn.Parameter(torch.full((n, 2), -1.5)), nn.Parameter(torch.zeros(n))

    def forward(self, grid, view):
        s = self.log_s.exp()
        A, B, C = self.project(s[:, 0], s[:, 1] * view, torch.tanh(self.rho))
        d = grid[:, None] - self.pos[None]
        power = -0.5 * (A * d[..., 0] ** 2 + C * d[..., 1] ** 2) - B * d[..., 0] * d[..., 1]
        return (torch.exp(power) * torch.sigmoid(self.logit)).sum(1)


class Scene(nn.Module):
    def __init__(self):
        super().__init__()
        self.render = Render(10)


def loss_fn(model, batch):
    grid, view, target = batch
    return F.mse_loss(model.render(grid, view), target)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(32, 2, generator=g), torch.rand(10, generator=g) * 0.5 + 0.5, torch.rand(32, generator=g)) for _ in range(5)]
    batches[3][1][6] = 0.0  # the camera looks along the disc
    m = Scene()
    return m, torch.optim.Adam(m.parameters(), 1e-2), batches, loss_fn
