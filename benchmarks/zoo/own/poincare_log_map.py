import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="poincare_log_map",
    title=(
        "Poincare ball: tanh in the exponential map saturates, the point lies on the rim and log(1 - |x|) "
        "in artanh is -inf"
    ),
    source="SauersML/gam#354; dalab/hyperbolic_nn#3; geoopt/geoopt#98", fidelity="adapted",
    precision="fp32", phase="forward", cause="log_of_zero", op=["log"],
    module="hyp.logmap", line="return 0.5 * (torch.log(1 + r) - torch.log(1 - r))",
    fix="Project the point to radius 1 - 1e-5 after the exponential map (clamp r below 1).",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


def artanh(r):
    return 0.5 * (torch.log(1 + r) - torch.log(1 - r))


class ExpMap(nn.Module):
    def forward(self, v):
        n = v.norm(dim=-1, keepdim=True).clamp(min=1e-7)
        return torch.tanh(n) * v / n


class LogMap(nn.Module):
    def forward(self, x):
        n = x.norm(dim=-1, keepdim=True).clamp(min=1e-7)
        return artanh(n) * x / n


class HypLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.expmap, self.logmap, self.lin = ExpMap(), LogMap(), nn.Linear(d, d)

    def forward(self, v):
        return self.lin(self.logmap(self.expmap(v)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.hyp, self.cls = nn.Linear(5, 1), HypLayer(1), nn.Linear(1, 3)

    def forward(self, x):
        return self.cls(self.hyp(self.emb(x)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 5, generator=g), torch.randint(0, 3, (10,), generator=g)) for _ in range(6)]
    m = Net()
    with torch.no_grad():
        m.emb.weight.abs_().add_(0.1)
    batches[3][0][4] = 30.0
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
