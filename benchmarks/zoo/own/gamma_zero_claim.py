import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Gamma

CASE = dict(
    id="gamma_zero_claim",
    title="Gamma likelihood of a claim of exactly 0: log_prob(0) is (a - 1) * log(0) = -inf",
    source="own (log_prob at the boundary of the support); compare rlworkgroup/garage#2129",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    phase_alt=["data"],
    cause="log_of_zero",
    cause_alt=["label_out_of_domain"],
    op=["xlogy", "log"],
    module="",
    line="nll = -Gamma(shape, rate).log_prob(batch.amount)",
    fix="Model zero claims separately (hurdle) or shift the amounts by a small positive constant.",
    recoverable_by=["skip", "fix_data", "fix_code"],
    step=3,
    symptom="loss",
)


class Claims:
    def __init__(self, features, amount):
        self.features = features
        self.amount = amount


class Severity(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 16), nn.SiLU())
        self.params = nn.Linear(16, 2)

    def forward(self, x):
        shape, rate = F.softplus(self.params(self.trunk(x))).unbind(-1)
        return shape + 1.1, rate + 0.1


def loss_fn(model, batch):
    shape, rate = model(batch.features)
    nll = -Gamma(shape, rate).log_prob(batch.amount)
    return nll.mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [Claims(torch.randn(10, 7, generator=g), torch.rand(10, generator=g) * 4 + 0.05) for _ in range(5)]
    batches[3].amount[7] = 0.0
    m = Severity()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
