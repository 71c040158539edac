import torch, torch.nn as nn

CASE = dict(
    id="healthy_soft_dtw_border", title="Soft-DTW fills the border of its table with inf; every cell has at least one finite neighbour",
    source="own (dynamic programming in log-space)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, x):
        return self.net(x)


def soft_dtw(d, gamma=1.0):
    n, m = d.shape
    inf = torch.tensor(float("inf"))
    rows = [[torch.tensor(0.0)] + [inf] * m]
    for i in range(n):
        row = [inf]
        for j in range(m):
            near = torch.stack([rows[i][j], rows[i][j + 1], row[j]])
            row.append(d[i, j] - gamma * torch.logsumexp(-near / gamma, 0))
        rows.append(row)
    return rows[n][m]


def loss_fn(model, batch):
    x, y = batch
    return soft_dtw((model(x)[:, None] - y[None]).square().sum(-1))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(4, 3, generator=g), torch.randn(3, 4, generator=g)) for _ in range(5)]
    return m, torch.optim.Adam(m.parameters(), 1e-2), batches, loss_fn
