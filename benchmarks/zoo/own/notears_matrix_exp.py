import torch, torch.nn as nn

CASE = dict(
    id="notears_matrix_exp", title="Acyclicity penalty trace(exp(W * W)) of a causal graph learner: a strong edge pair overflows the matrix exponential",
    source="own (NOTEARS users)", fidelity="analogue",
    precision="fp32", phase="forward", cause="exp_overflow", cause_alt=["overflow_any_precision"], op=["linalg_matrix_exp", "matrix_exp"],
    module="dag", line="torch.matrix_exp(w * w)", fix="Scale the adjacency, or use the log-det form of the constraint.",
    recoverable_by=["fix_code", "lower_lr"], step=0, symptom="loss",
)


class Dag(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.full((d, d), 5.0))

    def forward(self):
        w = self.w
        return torch.matrix_exp(w * w).diagonal().sum() - w.shape[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.dag = Dag(5)

    def forward(self, x):
        return x @ self.dag.w, self.dag()


def loss_fn(model, batch):
    rec, h = model(batch)
    return (batch - rec).square().mean() + 0.5 * h


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), [torch.randn(10, 5, generator=g) for _ in range(3)], loss_fn
