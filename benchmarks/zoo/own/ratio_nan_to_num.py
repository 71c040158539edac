import torch, torch.nn as nn

CASE = dict(
    id="ratio_nan_to_num", title="Recall per query is (hits / relevant).nan_to_num(): forward is repaired, but backward goes through 0 / 0",
    source="own (nan_to_num as a repair)", fidelity="analogue",
    precision="fp32", phase="backward", phase_alt=["forward"], cause="zero_over_zero", cause_alt=["zero_times_inf", "div_by_zero"], op=["div"],
    module="", line="(hits / relevant).nan_to_num()", fix="Clamp the denominator.",
    recoverable_by=["fix_code", "skip"], step=2, symptom="grad",
)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.d = nn.Linear(5, 8), nn.Linear(6, 8)

    def forward(self, q, d):
        return torch.einsum("bc,bnc->bn", self.q(q), self.d(d)).sigmoid()


def soft_recall(s, rel):
    hits = (s * rel).sum(-1)
    relevant = (s.detach() * rel).sum(-1) * 0 + rel.sum(-1) * s.mean(-1)
    return (hits / relevant).nan_to_num()


def loss_fn(model, batch):
    q, d, rel = batch
    return 1 - soft_recall(model(q, d), rel).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Ranker()
    batches = []
    for step in range(4):
        rel = torch.ones(6, 7)
        if step == 2:
            rel[5] = 0.0
        batches.append((torch.randn(6, 5, generator=g), torch.randn(6, 7, 6, generator=g), rel))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
