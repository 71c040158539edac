import torch
import torch.nn as nn

CASE = dict(
    id="duplicate_triplet",
    title="Batch-hard triplet loss takes the root of squared distances: two identical crops have distance 0",
    source="pytorch/pytorch#2421; own (pairwise distances with sqrt)",
    fidelity="adapted",
    precision="bf16",
    phase="backward",
    cause="sqrt_grad_at_zero",
    op=["sqrt"],
    module="criterion.metric",
    line="return gap.square().sum(dim=-1).sqrt()",
    fix="torch.cdist, or add an eps under the root.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=2,
    symptom="grad",
)


class Metric(nn.Module):
    def forward(self, a, b):
        gap = a[:, None] - b[None]
        return gap.square().sum(dim=-1).sqrt()


class BatchHard(nn.Module):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin
        self.metric = Metric()

    def forward(self, query, gallery, same):
        d = self.metric(query, gallery)
        hardest_pos = torch.where(same, d, d.new_zeros(())).amax(1)
        hardest_neg = torch.where(same, d.new_full((), float("inf")), d).amin(1)
        return (hardest_pos - hardest_neg + self.margin).relu().mean()


class ReID(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))
        self.criterion = BatchHard(1.0)


def loss_fn(model, batch):
    (q, qid), (k, kid) = batch
    return model.criterion(model.embed(q).float(), model.embed(k).float(), qid[:, None] == kid[None])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    ids = torch.arange(4).repeat_interleave(2)
    batches = [((torch.randn(8, 8, generator=g), ids), (torch.randn(8, 8, generator=g), ids)) for _ in range(5)]
    batches[2][1][0][5] = batches[2][0][0][4]  # the same crop is in the query and in the gallery set
    m = ReID()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
