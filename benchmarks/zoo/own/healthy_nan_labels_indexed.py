import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="healthy_nan_labels_indexed",
    title="Missing assay values are NaN in the targets; they are dropped by boolean indexing before the loss",
    source="pytorch/pytorch#64305 (the right way round)", fidelity="control",
    precision="bf16", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Assays(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 16), nn.ReLU())
        self.tasks = nn.Linear(16, 4)

    def forward(self, x):
        return self.tasks(self.body(x))


def loss_fn(model, batch):
    pred = model(batch["x"]).float()
    known = ~torch.isnan(batch["assay"])
    return F.mse_loss(pred[known], batch["assay"][known])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(8):
        assay = torch.randn(10, 4, generator=g)
        assay[torch.rand(10, 4, generator=g) < 0.4] = float("nan")
        batches.append({"x": torch.randn(10, 9, generator=g), "assay": assay})
    model = Assays()
    return model, torch.optim.AdamW(model.parameters(), 1e-2), batches, loss_fn
