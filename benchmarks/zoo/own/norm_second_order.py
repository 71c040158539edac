import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="norm_second_order",
    title=(
        "Force matching differentiates an energy with vector_norm twice: at distance 0 the first order is 0, "
        "the second NaN"
    ),
    source="pytorch/functorch#1097", fidelity="direct",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero",
    cause_alt=["zero_over_zero", "division_by_near_zero_norm"],
    op=["linalg_vector_norm", "norm", "div"], module="energy.radial",
    line="r = torch.linalg.vector_norm(rel, dim=-1, keepdim=True)",
    fix="Mask the zero distances before the norm, or use sqrt(r^2 + eps).",
    recoverable_by=["skip", "fix_code", "fix_data"], step=2, symptom="grad",
)


class Radial(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, rel):
        r = torch.linalg.vector_norm(rel, dim=-1, keepdim=True)
        return self.mlp(r).sum((-1, -2))


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame = nn.Linear(3, 3, bias=False)
        self.radial = Radial()

    def forward(self, pos, centre):
        return self.radial(self.frame(pos - centre))


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = Energy()


def loss_fn(model, batch):
    pos = batch["pos"].clone().requires_grad_()
    energy = model.energy(pos, batch["centre"])
    force, = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    return F.mse_loss(energy, batch["e"]) + F.mse_loss(-force, batch["f"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(4):
        pos = torch.randn(3, 4, 3, generator=g)
        centre = torch.zeros(3, 1, 3)
        if i == 2:
            pos[2, 1] = 0.0  # an atom in the centre of the cell
        batches.append({
            "pos": pos, "centre": centre,
            "e": torch.randn(3, generator=g), "f": torch.randn(3, 4, 3, generator=g),
        })
    model = Potential()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
