import torch, torch.nn as nn

CASE = dict(
    id="func_force_self_pair", title="Forces are torch.func.grad of a pair energy under vmap: the distance of an atom to itself is sqrt(0) and its derivative infinite",
    source="own (force-matching potentials)", fidelity="analogue",
    precision="fp32", phase="backward", phase_alt=["forward"], cause="sqrt_grad_at_zero", cause_alt=["zero_times_inf"], op=["sqrt"],
    module="", module_alt=["pot"], line="d2.sqrt()", fix="Leave out the diagonal, or add an eps under the root.",
    recoverable_by=["fix_code"], step=0, symptom="loss",
)


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, pos):
        d2 = (pos[:, None] - pos[None]).square().sum(-1)
        r = d2.sqrt()
        return self.net(r.reshape(-1, 1)).sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pot = Potential()

    def forward(self, pos):
        return torch.func.vmap(torch.func.grad(self.pot))(pos)


def loss_fn(model, batch):
    pos, force = batch
    return (model(pos) + force).square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(3, 4, 3, generator=g), torch.randn(3, 4, 3, generator=g)) for _ in range(3)]
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
