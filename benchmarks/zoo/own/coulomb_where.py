import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="coulomb_where", title="Electrostatic message where(d > 0, d^-1.5, 0): the self pairs are selected away forward, backward multiplies 0 by inf",
    source="pytorch/pytorch#16317, #52248; facebookresearch/fairchem#441", fidelity="adapted",
    precision="fp32", phase="backward", cause="zero_times_inf", cause_alt=["div_by_zero", "sqrt_grad_at_zero"], op=["pow", "mul"],
    module="interaction.coulomb", line="inv = torch.where(d2 > 0, d2.pow(-1.5), torch.zeros_like(d2))",
    fix="Replace d2 by 1 on the excluded pairs before the power (double where).",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="grad",
)


class Coulomb(nn.Module):
    def forward(self, pos, charge):
        rel = pos[:, None] - pos[None]
        off = ~torch.eye(pos.size(0), dtype=torch.bool)
        i, j = off.nonzero(as_tuple=True)
        d2 = rel[i, j].pow(2).sum(-1)
        inv = torch.where(d2 > 0, d2.pow(-1.5), torch.zeros_like(d2))
        f = (charge[i] * charge[j] * inv).unsqueeze(-1) * rel[i, j]
        return torch.zeros_like(pos).index_add(0, i, f)


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.charge, self.coulomb = nn.Linear(4, 1), Coulomb()

    def forward(self, pos, z):
        return self.coulomb(pos, self.charge(z).squeeze(-1))


class ForceField(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.emb, self.interaction = nn.Linear(3, 3), nn.Embedding(5, 4), Interaction()

    def forward(self, pos, z):
        return self.interaction(self.shift(pos), self.emb(z))


def loss_fn(model, batch):
    pos, z, f = batch
    return F.l1_loss(model(pos, z), f)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(9, 3, generator=g) * 2, torch.randint(0, 5, (9,), generator=g), torch.randn(9, 3, generator=g)) for _ in range(5)]
    batches[3][0][7] = batches[3][0][2]  # alternate location: two records of the same atom
    m = ForceField()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
