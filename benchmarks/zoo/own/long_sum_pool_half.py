import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="long_sum_pool_half",
    title="Sum pooling over time in half: 3000 frames of positive features sum to more than 65504",
    source="own (sum pooling over a long recording)", fidelity="adapted",
    precision="fp16", phase="forward", cause="overflow_fp16", op=["sum"],
    module="pool", line="return h.sum(1)",
    fix="Average over time (or sum in fp32).",
    recoverable_by=["skip", "fp32", "fix_code", "fix_data"], step=4, symptom="loss",
)


class SumPool(nn.Module):
    def forward(self, h):
        return h.sum(1)


class Events(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame = nn.Linear(4, 8)
        self.pool = SumPool()
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        h = F.relu(self.frame(x))
        return self.out(self.norm(self.pool(h)))


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).float(), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        n = 3000 if i == 4 else 100
        batches.append((torch.rand(2, n, 4, generator=g) * 20, torch.randint(0, 3, (2,), generator=g)))
    model = Events()
    with torch.no_grad():
        model.frame.weight.abs_().add_(0.5)
    return model, torch.optim.Adam(model.parameters(), 1e-4), batches, loss_fn
