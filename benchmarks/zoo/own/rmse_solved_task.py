import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="rmse_solved_task", title="Molecular property training takes the root of the per-task MSE; a task whose only label is predicted exactly has RMSE 0",
    source="ZFTurbo/Music-Source-Separation-Training#200; vccimaging/DeepLens#105", fidelity="adapted",
    precision="bf16", phase="backward", cause="sqrt_grad_at_zero", op=["sqrt", "pow"],
    module="", line="rmse = torch.sqrt((err * seen).sum(0) / seen.sum(0).clamp(min=1))",
    fix="torch.sqrt(mse + 1e-8), or train on the MSE.",
    recoverable_by=["skip", "fix_code"], step=4, symptom="grad",
)


class MPN(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms, self.ffn = nn.EmbeddingBag(30, 16), nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, ids):
        return self.ffn(self.atoms(ids))


def loss_fn(model, batch):
    ids, y, seen = batch
    err = (model(ids).float() * seen - y * seen).pow(2)
    rmse = torch.sqrt((err * seen).sum(0) / seen.sum(0).clamp(min=1))
    return rmse.mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        seen = (torch.rand(10, 4, generator=g) > 0.3).float()
        if i == 4:
            seen[:, 2] = 0.0  # nobody measured this assay in this batch
        batches.append((torch.randint(0, 30, (10, 5), generator=g), torch.randn(10, 4, generator=g), seen))
    m = MPN()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
