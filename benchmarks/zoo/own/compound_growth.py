import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="compound_growth", title="Epidemic model multiplies daily growth factors with cumprod: a faulty contact rate of 40 over 90 days leaves the fp32 range",
    source="antoinecarme/pyaf#179; pytorch/pytorch#88556", fidelity="adapted",
    precision="fp32", phase="forward", cause="overflow_any_precision", op=["cumprod"],
    module="dyn.rollout", line="level = torch.cumprod(factor, dim=1)",
    fix="Accumulate in log space (cumsum of log factors) and bound the growth rate.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class Rollout(nn.Module):
    def forward(self, factor, start):
        level = torch.cumprod(factor, dim=1)
        return start[:, None] * level


class Dynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate, self.rollout = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)), Rollout()

    def forward(self, cov, contact, start):
        growth = 1 + 0.02 * torch.tanh(self.rate(cov).squeeze(-1)) + 0.1 * (contact - 1)
        return self.rollout(growth, start)


class Epi(nn.Module):
    def __init__(self):
        super().__init__()
        self.dyn = Dynamics()


def loss_fn(model, batch):
    cov, contact, start, y = batch
    cases = model.dyn(cov, contact, start)
    return F.mse_loss(torch.log1p(cases), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        contact = 1 + 0.1 * torch.rand(4, 90, generator=g)
        if i == 3:
            contact[2] = 40.0
        batches.append((torch.randn(4, 90, 3, generator=g), contact, torch.full((4,), 10.0), torch.rand(4, 90, generator=g) * 3))
    m = Epi()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
