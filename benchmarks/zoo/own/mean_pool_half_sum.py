import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="mean_pool_half_sum",
    title="Masked mean pooling sums a long half-precision document before it divides: the sum passes 65504",
    source="own (sentence-embedding pooling; compare huggingface/transformers#9295 on fp16 hidden-state overflow)",
    fidelity="adapted",
    precision="fp16",
    phase="forward",
    cause="overflow_fp16",
    op=["sum"],
    module="pooler",
    line="total = (hidden * keep).sum(dim=1)",
    fix="Divide before summing, or pool in fp32.",
    recoverable_by=["skip", "fp32", "fix_code", "fix_data"],
    step=2,
    symptom="loss",
)


class MeanPooler(nn.Module):
    def forward(self, hidden, keep):
        keep = keep.unsqueeze(-1).to(hidden.dtype)
        total = (hidden * keep).sum(dim=1)
        return total / keep.sum(dim=1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 12)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, ids):
        return self.mlp(self.table(ids))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.pooler = MeanPooler()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, ids, keep):
        return self.head(self.norm(self.pooler(self.encoder(ids), keep)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["ids"], batch["keep"]), batch["y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for n in (40, 200, 1800, 60, 40):
        ids = torch.randint(0, 64, (3, n), generator=g)
        keep = torch.ones(3, n, dtype=torch.bool)
        keep[0, n // 2:] = False
        batches.append({"ids": ids, "keep": keep, "y": torch.randint(0, 2, (3,), generator=g)})
    m = Siamese()
    with torch.no_grad():
        m.encoder.mlp[2].bias.copy_(torch.tensor([50.0, -40.0, 10.0, 5.0, 45.0, 0.0, -5.0, 20.0]))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
