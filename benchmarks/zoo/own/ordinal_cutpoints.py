import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="ordinal_cutpoints", title="Ordinal regression: class probability is a difference of two sigmoids; an update swaps two cut points and the log gets a negative number",
    source="CecileProust-Lima/lcmm#13 (thresholds that are not increasing); QunBB/DeepLearning#1 (log of a weight that drifts negative)", fidelity="adapted",
    precision="fp32", phase="forward", cause="log_of_negative", op=["log"],
    module="link", line="return torch.log(like)",
    fix="Keep the cut points ordered (cumulative softplus) or clip them after every step.",
    recoverable_by=["lower_lr", "clip", "fix_code"], step=5, symptom="loss", seeds=[0],
)


class CumulativeLink(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.cut = nn.Parameter(torch.linspace(-0.6, 0.6, k - 1))

    def forward(self, score, y):
        cdf = torch.sigmoid(self.cut - score[:, None])
        cdf = torch.cat([torch.zeros_like(score[:, None]), cdf, torch.ones_like(score[:, None])], 1)
        like = cdf.gather(1, y[:, None] + 1) - cdf.gather(1, y[:, None])
        return torch.log(like)


class Ordinal(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.link = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)), CumulativeLink(4)

    def forward(self, x, y):
        return self.link(self.net(x).squeeze(-1), y)


def loss_fn(model, batch):
    return -model(*batch).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(12):
        batches.append((torch.randn(16, 5, generator=g), torch.randint(0, 2, (16,), generator=g) * 3))
    for b in batches[5:]:
        b[1][0] = 1
    m = Ordinal()
    groups = [dict(params=m.link.parameters(), lr=3.0), dict(params=m.net.parameters(), lr=1e-2)]
    return m, torch.optim.SGD(groups), batches, loss_fn
