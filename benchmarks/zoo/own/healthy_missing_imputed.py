import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="healthy_missing_imputed",
    title=(
        "Tabular batches hold NaN and inf for missing cells; they are replaced by a learned value before "
        "the first layer"
    ),
    source="BLAST-AI-ML/synapse#237; chemprop/chemprop#960", fidelity="control",
    precision="bf16", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Impute(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        ok = torch.isfinite(x)
        return torch.cat([torch.where(ok, x, self.fill), ok.float()], -1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.impute, self.body, self.out = Impute(6), nn.Linear(12, 20), nn.Linear(20, 1)

    def forward(self, x):
        return self.out(F.relu(self.body(self.impute(x)))).squeeze(-1).float()


def loss_fn(model, batch):
    x, y = batch
    known = torch.isfinite(y)
    return F.mse_loss(model(x)[known], y[known])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(8):
        x, y = torch.randn(10, 6, generator=g), torch.randn(10, generator=g)
        x[torch.rand(10, 6, generator=g) > 0.8] = float("nan")
        x[i % 10, 2] = float("inf")
        y[(i + 3) % 10] = float("nan")
        batches.append((x, y))
    m = Net()
    return m, torch.optim.AdamW(m.parameters(), 1e-2), batches, loss_fn
