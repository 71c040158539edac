import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="sample_weight_empty",
    title=(
        "Per-query weights are divided by their sum in the loader; a query without clicks has weight 0 / 0 "
        "in the batch"
    ),
    source="own", fidelity="adapted",
    precision="fp32", phase="data", cause="input_nonfinite", cause_alt=["zero_over_zero"],
    op=["mul"], module="", line='meta = {"weight": clicks / clicks.sum(-1, keepdim=True)}',
    fix="Leave out queries without clicks, or divide by clicks.sum().clamp(min=1).",
    recoverable_by=["skip", "fix_data", "fix_code"], step=2, symptom="loss",
)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, docs):
        return self.net(docs).squeeze(-1)


def listwise(scores, weight):
    return -(weight * F.log_softmax(scores, -1)).sum(-1).mean()


def loss_fn(model, batch):
    docs, (_, meta) = batch
    return listwise(model(docs), meta["weight"])


def make_batch(g, empty):
    docs = torch.randn(6, 9, 7, generator=g)
    clicks = (torch.rand(6, 9, generator=g) > 0.6).float()
    clicks[:, 0] = 1.0
    if empty:
        clicks[4] = 0.0
    meta = {"weight": clicks / clicks.sum(-1, keepdim=True)}
    return docs, (clicks, meta)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [make_batch(g, empty=(i == 2)) for i in range(4)]
    model = Scorer()
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), batches, loss_fn
