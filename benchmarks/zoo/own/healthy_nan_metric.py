import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="healthy_nan_metric",
    title="Per-class recall is 0 / 0 for classes that are absent from the batch; it is only logged, with nanmean",
    source="own (metrics of absent classes)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 6))
        self.spare = nn.Linear(6, 6)  # kept for an ablation, never used: it gets no gradient
        self.history = []

    def forward(self, x):
        return self.net(x)


@torch.no_grad()
def recall(logits, y, classes):
    hit = F.one_hot(y[logits.argmax(-1) == y], classes).sum(0).float()
    total = F.one_hot(y, classes).sum(0).float()
    return hit / total


def loss_fn(model, batch):
    x, y = batch
    logits = model(x)
    model.history.append(float(recall(logits, y, 6).nanmean()))
    return F.cross_entropy(logits, y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 6, generator=g), torch.randint(0, 4, (8,), generator=g)) for _ in range(8)]
    model = Classifier()
    return model, torch.optim.Adam(model.parameters(), 1e-2), batches, loss_fn
