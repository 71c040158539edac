import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="bincount_batch_weight", title="Per-batch class weights are 1 / bincount: a class that is absent has an infinite weight, and a regulariser uses it",
    source="own (effective-number weights per batch)", fidelity="analogue",
    precision="fp32", phase="forward", cause="div_by_zero", op=["reciprocal", "div"],
    module="loss", line="w = 1.0 / n", fix="Clamp the counts at 1.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=2, symptom="loss",
)


class Balanced(nn.Module):
    def forward(self, logits, y):
        n = torch.bincount(y, minlength=logits.shape[1]).float()
        w = 1.0 / n
        prior = (w * logits.softmax(-1).mean(0)).sum()
        return (F.cross_entropy(logits, y, reduction="none") * w[y]).sum() + 0.01 * prior


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.loss = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3)), Balanced()

    def forward(self, x, y):
        return self.loss(self.net(x), y)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = []
    for step in range(4):
        y = torch.arange(9) % 3 if step != 2 else torch.arange(9) % 2
        batches.append((torch.randn(9, 5, generator=g), y))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
