import torch, torch.nn as nn

CASE = dict(
    id="qr_twin_columns", title="Orthogonal subspace by QR: two columns of the learned basis were initialised alike, R has a zero on its diagonal and the backward solves with it",
    source="pytorch/pytorch#42792; meta-pytorch/botorch#567", fidelity="direct",
    precision="fp32", phase="backward", cause="div_by_zero", cause_alt=["zero_over_zero"], op=["linalg_qr", "qr", "linalg_solve_triangular"],
    module="basis", line="torch.linalg.qr(self.weight)", fix="Start from linearly independent columns, or use a parametrisation that stays full rank.",
    recoverable_by=["fix_code"], step=0, symptom="grad",
)


class Basis(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        w = torch.zeros(d, k)
        w[:k] = torch.eye(k)
        w[:, 1] = w[:, 0]
        self.weight = nn.Parameter(w)

    def forward(self, x):
        q, _ = torch.linalg.qr(self.weight)
        return x @ q


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.basis = Basis(6, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.basis(x))


def loss_fn(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 6, generator=g), torch.randn(8, 2, generator=g)) for _ in range(3)]
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
