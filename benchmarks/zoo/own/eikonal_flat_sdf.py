import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="eikonal_flat_sdf",
    title="Eikonal regulariser of a ReLU distance net: where it is flat, the length of the gradient has no slope",
    source="nerfstudio-project/nerfstudio#1444 (eikonal term); pytorch/pytorch#2421, #2534",
    fidelity="adapted",
    precision="fp32",
    phase="backward",
    cause="sqrt_grad_at_zero",
    op=["pow"],
    module="eikonal",
    line="length = (normal * normal).sum(-1) ** 0.5",
    fix="Add 1e-12 under the root (or use normal.norm(dim=-1), whose subgradient is 0).",
    recoverable_by=["skip", "fix_code"],
    step=3,
    symptom="grad",
)


class SDF(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.ModuleList([nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 1)])

    def forward(self, p):
        for layer in self.lin[:-1]:
            p = F.relu(layer(p))
        return self.lin[-1](p).squeeze(-1)


class Eikonal(nn.Module):
    def forward(self, normal):
        length = (normal * normal).sum(-1) ** 0.5
        return (length - 1.0).square().mean()


class Surface(nn.Module):
    def __init__(self):
        super().__init__()
        self.sdf = SDF()
        self.eikonal = Eikonal()

    def normals(self, points):
        points = points.requires_grad_(True)
        dist = self.sdf(points)
        return torch.autograd.grad(dist, points, torch.ones_like(dist), create_graph=True)[0]


def loss_fn(model, batch):
    on_surface, space = batch["surface"], batch["space"].clone()
    return model.sdf(on_surface).abs().mean() + 0.1 * model.eikonal(model.normals(space))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        space = torch.rand(8, 3, generator=g)
        if i == 3:
            space[5] = -30.0  # far outside of the unit cube
        batches.append({"surface": torch.rand(6, 3, generator=g), "space": space})
    m = Surface()
    with torch.no_grad():
        m.sdf.lin[0].weight.abs_()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
