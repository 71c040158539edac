import math, torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="vonmises_i0",
    title=(
        "Von Mises likelihood of a heading uses log(i0(kappa)): the Bessel function overflows fp32 for "
        "kappa above 91"
    ),
    source="stan-dev/math#1076; pymc-devs/pymc#2832; circstat/circstat-matlab#6", fidelity="direct",
    precision="fp32", phase="forward", cause="overflow_any_precision", cause_alt=["exp_overflow"],
    op=["i0", "special_i0"], module="", line="log_norm = torch.log(2 * math.pi * torch.special.i0(kappa))",
    fix="log(i0e(kappa)) + kappa instead of log(i0(kappa)).",
    recoverable_by=["skip", "fix_code"], step=4, symptom="loss",
)


class Heading(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 3))

    def forward(self, x):
        o = self.body(x)
        return torch.atan2(o[:, 1], o[:, 0]), F.softplus(o[:, 2])


def von_mises_nll(mu, kappa, y):
    log_norm = torch.log(2 * math.pi * torch.special.i0(kappa))
    return (log_norm - kappa * torch.cos(y - mu)).mean()


def loss_fn(model, batch):
    mu, kappa = model(batch[0])
    return von_mises_nll(mu, kappa, batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(10, 7, generator=g), torch.rand(10, generator=g) * 6 - 3) for _ in range(6)]
    m = Heading()
    with torch.no_grad():
        m.body[0].weight.abs_()
        m.body[2].weight[2].abs_()
    batches[4][0][2] *= 200.0
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
