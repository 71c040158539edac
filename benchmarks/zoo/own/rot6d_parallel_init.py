import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="rot6d_parallel_init",
    title=(
        "6D rotation head starts with both columns equal: the Gram-Schmidt residual of the second column is "
        "0, 0 / |0|"
    ),
    source="papagina/RotationContinuity#2; oppo-us-research/SpacetimeGaussians#96", fidelity="adapted",
    precision="fp32", phase="forward", cause="division_by_near_zero_norm", cause_alt=["zero_over_zero"], op=["div"],
    module="pose.to_matrix", line="b2 = r / r.norm(dim=-1, keepdim=True)",
    fix="Initialise the bias with the identity columns (1,0,0, 0,1,0); F.normalize guards the division.",
    recoverable_by=["fix_code"], step=0, symptom="loss",
)


class Rot6d(nn.Module):
    def forward(self, a1, a2):
        b1 = a1 / a1.norm(dim=-1, keepdim=True)
        r = a2 - (b1 * a2).sum(-1, keepdim=True) * b1
        b2 = r / r.norm(dim=-1, keepdim=True)
        return torch.stack([b1, b2, torch.cross(b1, b2, dim=-1)], -1)


class PoseHead(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc, self.to_matrix = nn.Linear(d, 6), Rot6d()
        nn.init.zeros_(self.fc.weight)
        with torch.no_grad():
            self.fc.bias.copy_(torch.tensor([1.0, 0, 0, 1.0, 0, 0]))

    def forward(self, h):
        o = self.fc(h)
        return self.to_matrix(o[:, :3], o[:, 3:])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pose = nn.Sequential(nn.Linear(9, 24), nn.ReLU()), PoseHead(24)

    def forward(self, pts):
        return self.pose(self.body(pts))


def loss_fn(model, batch):
    pts, rot = batch
    return F.mse_loss(model(pts), rot)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(4):
        q = torch.linalg.qr(torch.randn(6, 3, 3, generator=g))[0]
        batches.append((torch.randn(6, 9, generator=g), q))
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
