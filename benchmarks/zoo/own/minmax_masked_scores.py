import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="minmax_masked_scores",
    title="Reranker rescales scores to [0, 1] by min and max after padded candidates were set to -inf: -inf - (-inf)",
    source="Nixtla/neuralforecast#672; THUwangcy/ReChorus#8",
    fidelity="adapted",
    precision="fp32", phase="forward", cause="inf_minus_inf", op=["sub"],
    module="rerank.scale", line="return (s - lo) / (hi - lo + 1e-6)",
    fix="Take the minimum over the valid candidates only (fill with +inf before amin) and mask afterwards.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class MinMax(nn.Module):
    def forward(self, s):
        lo, hi = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)
        return (s - lo) / (hi - lo + 1e-6)


class Rerank(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), MinMax()

    def forward(self, cand, pad):
        s = self.net(cand).squeeze(-1).masked_fill(pad, -torch.inf)
        return self.scale(s)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rerank = Rerank()

    def forward(self, cand, pad):
        return self.rerank(cand, pad)


def loss_fn(model, batch):
    cand, pad, rel = batch
    return ((model(cand, pad) - rel).pow(2)).masked_fill(pad, 0.0).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        pad = torch.zeros(5, 8, dtype=torch.bool)
        if i >= 3:
            pad[i - 2, 6:] = True        # the first query with fewer than eight hits
        batches.append((torch.randn(5, 8, 6, generator=g), pad, torch.rand(5, 8, generator=g)))
    m = Model()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
