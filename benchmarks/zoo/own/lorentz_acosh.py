import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="lorentz_acosh",
    title="Hyperbolic embedding: the Lorentz product of a point with itself rounds below 1 and acosh is NaN",
    source="geoopt/geoopt#98, #100 (domain of the inverse hyperbolic functions)",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="acos_asin_domain",
    op=["acosh"],
    module="space",
    line="return torch.acosh(-self.inner(self.lift(a), self.lift(b)))",
    fix="Clamp the argument at 1 + 1e-6.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
    seeds=[0],
)


class Lorentz(nn.Module):
    @staticmethod
    def lift(v):
        return torch.cat([(1 + v.pow(2).sum(-1, keepdim=True)).sqrt(), v], -1)

    @staticmethod
    def inner(a, b):
        prod = a * b
        return prod[..., 1:].sum(-1) - prod[..., 0]

    def forward(self, a, b):
        return torch.acosh(-self.inner(self.lift(a), self.lift(b)))


class Taxonomy(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 5)
        self.space = Lorentz()

    def forward(self, pairs):
        return self.space(self.table(pairs[:, 0]), self.table(pairs[:, 1]))


def loss_fn(model, batch):
    pairs, linked = batch
    return F.binary_cross_entropy_with_logits(2.0 - model(pairs), linked)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        a = torch.randint(0, 15, (10,), generator=g)
        b = torch.randint(15, 30, (10,), generator=g)
        if i == 3:
            b[:] = a  # self loops of the graph
        batches.append((torch.stack([a, b], 1), torch.randint(0, 2, (10,), generator=g).float()))
    m = Taxonomy()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
