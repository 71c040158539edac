import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="cholesky_factor_dead", title="Mixture with a predicted Cholesky factor: relu on the diagonal gives a 0 there and the triangular solve divides by it",
    source="own (full-covariance heads without softplus)", fidelity="analogue",
    precision="fp32", phase="forward", cause="div_by_zero", cause_alt=["zero_over_zero"], op=["linalg_solve_triangular", "triangular_solve"],
    module="head", line="torch.linalg.solve_triangular(l, diff.unsqueeze(-1), upper=False)", fix="Use softplus plus an eps for the diagonal.",
    recoverable_by=["fix_code", "skip"], step=0, symptom="loss",
)


class CovHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu, self.diag, self.off = nn.Linear(8, 2), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, h, y):
        d = F.relu(self.diag(h))
        l = torch.diag_embed(d)
        l[:, 1, 0] = self.off(h).squeeze(-1)
        diff = y - self.mu(h)
        z = torch.linalg.solve_triangular(l, diff.unsqueeze(-1), upper=False)
        return 0.5 * z.square().sum((1, 2)).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.head = CovHead()

    def forward(self, x, y):
        return self.head(self.trunk(x), y)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 3, generator=g), torch.randn(10, 2, generator=g)) for _ in range(3)]
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
