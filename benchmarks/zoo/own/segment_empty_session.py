import torch, torch.nn as nn

CASE = dict(
    id="segment_empty_session", title="Sessions of clicks are averaged with torch.segment_reduce: a session without clicks is the mean of nothing",
    source="own (ragged pooling)", fidelity="analogue",
    precision="fp32", phase="forward", cause="zero_over_zero", op=["segment_reduce"],
    module="pool", line='torch.segment_reduce(e, "mean"', fix="Pass initial=0 or clamp the lengths.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=1, symptom="loss",
)


class Pool(nn.Module):
    def forward(self, e, lengths):
        return torch.segment_reduce(e, "mean", lengths=lengths, axis=0)


class Rec(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 6)
        self.pool = Pool()
        self.out = nn.Linear(6, 20)

    def forward(self, items, lengths):
        return self.out(self.pool(self.emb(items), lengths))


def loss_fn(model, batch):
    items, lengths, y = batch
    return nn.functional.cross_entropy(model(items, lengths), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(3):
        lengths = torch.tensor([3, 2, 4, 1]) if step != 1 else torch.tensor([3, 0, 4, 3])
        batches.append((torch.randint(0, 20, (10,), generator=g), lengths, torch.randint(0, 20, (4,), generator=g)))
    m = Rec()
    return m, torch.optim.Adam(m.parameters(), 1e-2), batches, loss_fn
