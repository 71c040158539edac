import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="face_normal_sliver", title="Mesh normal-consistency loss divides the cross product of two edges by its length; a degenerate face has two equal vertices",
    source="pytorch/pytorch#2721; francois-rozet/piqa#33", fidelity="adapted",
    precision="fp32", phase="forward", cause="division_by_near_zero_norm", cause_alt=["zero_over_zero"], op=["div"],
    module="reg.normals", line="return n / n.norm(dim=-1, keepdim=True)",
    fix="F.normalize(n, eps=1e-6), or remove degenerate faces.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class FaceNormals(nn.Module):
    def forward(self, verts, faces):
        a, b, c = verts[faces].unbind(1)
        n = torch.linalg.cross(b - a, c - a)
        return n / n.norm(dim=-1, keepdim=True)


class NormalReg(nn.Module):
    def __init__(self):
        super().__init__()
        self.normals = FaceNormals()

    def forward(self, verts, faces, pairs):
        n = self.normals(verts, faces)
        return (1 - (n[pairs[:, 0]] * n[pairs[:, 1]]).sum(-1)).mean()


class Deform(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.reg = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)), NormalReg()

    def forward(self, v):
        return v + 0.1 * self.mlp(v)


def loss_fn(model, batch):
    v, faces, pairs, target = batch
    out = model(v)
    return F.mse_loss(out, target) + 0.1 * model.reg(out, faces, pairs)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        v = torch.randn(12, 3, generator=g)
        faces = torch.stack([torch.randperm(12, generator=g)[:3] for _ in range(8)])
        if i == 3:
            v[faces[5, 1]] = v[faces[5, 0]]  # two vertices were welded, the face stayed
        pairs = torch.stack([torch.arange(7), torch.arange(1, 8)], 1)
        batches.append((v, faces, pairs, torch.randn(12, 3, generator=g)))
    m = Deform()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
