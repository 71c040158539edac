import torch, torch.nn as nn

CASE = dict(
    id="kalman_singular_gain", title="Differentiable Kalman update inverts the innovation covariance with inv_ex, which does not check: a duplicated sensor makes it singular",
    source="own (differentiable filters)", fidelity="analogue",
    precision="fp32", phase="forward", cause="div_by_zero", cause_alt=["zero_over_zero"], op=["linalg_inv_ex", "inv_ex", "linalg_inv"],
    module="update", line="torch.linalg.inv_ex(s)", fix="Add a little noise to the diagonal, or use linalg.inv, which raises.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=1, symptom="loss",
)


class Update(nn.Module):
    def __init__(self, d, m):
        super().__init__()
        self.h = nn.Linear(d, m, bias=False)

    def forward(self, x, p, z, r):
        h = self.h.weight
        s = r[:, :, None] * r[:, None, :] + 0 * (h @ p @ h.T)
        k = p @ h.T @ torch.linalg.inv_ex(s).inverse
        return x + (k @ (z - x @ h.T).unsqueeze(-1)).squeeze(-1)


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.predict = nn.Linear(4, 4)
        self.update = Update(4, 1)

    def forward(self, x, p, z, r):
        return self.update(self.predict(x), p, z, r)


def loss_fn(model, batch):
    x, p, z, r, y = batch
    return (model(x, p, z, r) - y).square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(3):
        r = 0.5 + torch.rand(6, 1, generator=g)
        if step == 1:
            r[4] = 0.0
        x, z, y = (torch.randn(6, n, generator=g) for n in (4, 1, 4))
        batches.append((x, torch.eye(4), z, r, y))
    m = Filter()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
