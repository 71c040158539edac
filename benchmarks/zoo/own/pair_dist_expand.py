import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="pair_dist_expand", title="Metric learning expands |a - b|^2 to aa + bb - 2ab: for two near copies rounding makes it negative under the root, or exactly 0 on some CPUs",
    source="pytorch/pytorch#123082, #37154", fidelity="adapted",
    precision="fp32", phase="forward", phase_alt=["backward"], cause="sqrt_of_negative", cause_alt=["sqrt_grad_at_zero"], op=["sqrt"],
    module="miner", line="return torch.sqrt(d2)",
    fix="d2.clamp(min=1e-12) before the root, or torch.cdist.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Miner(nn.Module):
    def forward(self, a, b):
        d2 = a.pow(2).sum(1)[:, None] + b.pow(2).sum(1)[None] - 2 * a @ b.t()
        return torch.sqrt(d2)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.miner = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16)), Miner()

    def forward(self, q, g):
        return self.miner(self.net(q), self.net(g))


def loss_fn(model, batch):
    q, gal, pos = batch
    d = model(q, gal)
    return F.cross_entropy(-d, pos)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        q, gal = torch.randn(8, 10, generator=g), torch.randn(8, 10, generator=g)
        if i == 3:
            gal[:4] = q[:4] * (1 + 1e-6)
            q, gal = q * 30, gal * 30
        batches.append((q, gal, torch.arange(8)))
    m = Embedder()
    return m, torch.optim.SGD(m.parameters(), 1e-3), batches, loss_fn
