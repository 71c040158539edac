import torch, torch.nn as nn

CASE = dict(
    id="em_empty_component", title="A clustering layer recomputes its centres as weighted means in the forward pass: a centre far from all points has a total weight of exactly 0",
    source="own (deep clustering layers)", fidelity="analogue",
    precision="fp32", phase="forward", cause="zero_over_zero", op=["div"],
    module="cluster", line="centres = (r.T @ z) / r.sum(0)[:, None]", fix="Add an eps to the total weight.",
    recoverable_by=["fix_code", "skip"], step=0, symptom="loss",
)


class Cluster(nn.Module):
    def __init__(self, k, d):
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(k, d))
        with torch.no_grad():
            self.seeds[2] = 40.0

    def forward(self, z):
        r = torch.softmax(-(z[:, None] - self.seeds).square().sum(-1), -1)
        centres = (r.T @ z) / r.sum(0)[:, None]
        return (z[:, None] - centres).square().sum(-1).amin(-1).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.cluster = nn.Linear(5, 3), Cluster(3, 3)

    def forward(self, x):
        return self.cluster(self.enc(x))


def loss_fn(model, batch):
    return model(batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), [torch.randn(10, 5, generator=g) for _ in range(3)], loss_fn
