import torch, torch.nn as nn

CASE = dict(
    id="sinkhorn_kernel",
    title=(
        "Sinkhorn matching in the plain domain: exp(-C / 0.05) of a far point underflows, its row sum is 0 "
        "and a / 0 is inf"
    ),
    source="PythonOT/POT#54, #194; rajewsky-lab/novosparc#50", fidelity="direct",
    precision="fp32", phase="forward", cause="div_by_zero", op=["div"],
    module="matcher.ot", line="u = a / (kernel @ v)",
    fix="Iterate in log space (logsumexp), or use a larger entropic regularisation.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Sinkhorn(nn.Module):
    def __init__(self, eps=0.05, iters=8):
        super().__init__()
        self.eps, self.iters = eps, iters

    def forward(self, cost):
        kernel = torch.exp(-cost / self.eps)
        a = torch.full((cost.size(0),), 1.0 / cost.size(0))
        b = torch.full((cost.size(1),), 1.0 / cost.size(1))
        v = torch.ones_like(b)
        for _ in range(self.iters):
            u = a / (kernel @ v)
            v = b / (kernel.t() @ u)
        return (u[:, None] * kernel * v[None] * cost).sum()


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.dst, self.ot = nn.Linear(4, 6), nn.Linear(4, 6), Sinkhorn()

    def forward(self, x, y):
        p, q = self.src(x), self.dst(y)
        cost = (p[:, None] - q[None]).pow(2).mean(-1)
        return self.ot(cost)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.matcher = Matcher()

    def forward(self, x, y):
        return self.matcher(x, y)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(7, 4, generator=g) * 0.5, torch.randn(9, 4, generator=g) * 0.5) for _ in range(6)]
    batches[3][0][2] *= 40.0
    m = Model()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
