import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="softplus_lambda",
    title="Softplus written as log(1 + exp(x)) in a lambda: a large pre-activation overflows exp",
    source="tonyduan/mixture-density-network#4; own (hand-written softplus)",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="exp_overflow",
    op=["exp"],
    module="nets.sigma",
    line="softplus = lambda x: torch.log(1 + torch.exp(x))",
    fix="Use F.softplus.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)

softplus = lambda x: torch.log(1 + torch.exp(x))  # noqa: E731


class Branch(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.lift = nn.Linear(6, 12)
        self.drop = nn.Linear(12, 1)
        self.act = act

    def forward(self, x):
        return self.act(self.drop(F.relu(self.lift(x))))


class Density(nn.Module):
    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleDict({"mu": Branch(lambda x: x), "sigma": Branch(softplus)})

    def forward(self, x):
        return {name: net(x).squeeze(-1) for name, net in self.nets.items()}


def loss_fn(model, batch):
    out = model(batch[0])
    sigma = out["sigma"] + 1e-3
    return (torch.log(sigma) + (batch[1] - out["mu"]).pow(2) / (2 * sigma * sigma)).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 6, generator=g), torch.randn(8, generator=g)) for _ in range(5)]
    batches[3][0][5] *= 800.0
    m = Density()
    with torch.no_grad():
        m.nets["sigma"].drop.weight.abs_()
    return m, torch.optim.Adam(m.parameters(), 1e-4), batches, loss_fn
