import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="kabsch_symmetric",
    title=(
        "Rigid alignment by SVD inside the loss: a symmetric set of key points gives equal singular values, "
        "1 / (s_i - s_j)"
    ),
    source="jax-ml/jax#2311; tensorflow/tensorflow#17476; Pzoom522/ProcrustEs-KGE#2", fidelity="direct",
    precision="fp32", phase="backward", cause="div_by_zero", cause_alt=["zero_over_zero", "zero_times_inf"],
    op=["linalg_svd", "_linalg_svd", "svd", "div"], module="align", line="u, s, vh = torch.linalg.svd(cov)",
    fix="Add a small distinct jitter to the covariance, or detach the rotation.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class Kabsch(nn.Module):
    def forward(self, p, q):
        p = p - p.mean(1, keepdim=True)
        q = q - q.mean(1, keepdim=True)
        cov = p.transpose(1, 2) @ q
        u, s, vh = torch.linalg.svd(cov)
        return p @ (u @ vh), q


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift, self.align = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3)), Kabsch()

    def forward(self, pts, ref):
        return self.align(self.scale * pts + self.shift, ref)


def loss_fn(model, batch):
    a, b = model(*batch)
    return F.mse_loss(a, b * 1.1)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(3, 6, 3, generator=g), torch.randn(3, 6, 3, generator=g)) for _ in range(4)]
    octa = torch.cat([torch.eye(3), -torch.eye(3)])
    batches[3][0][1] = octa
    batches[3][1][1] = octa
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
