import torch, torch.nn as nn
from torch.distributions import Uniform

CASE = dict(
    id="uniform_prior_edge", title="Simulation-based inference scores proposals with a Uniform prior: a proposal outside of the box has log-probability -inf",
    source="own (simulation-based inference)", fidelity="analogue",
    precision="fp32", phase="forward", cause="log_of_zero", op=["log"],
    module="", line="box.log_prob(theta)", fix="Reject proposals outside of the prior.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=2, symptom="loss",
)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu, self.log_s = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, theta, x):
        z = (theta - self.mu(x)) * (-self.log_s).exp()
        return -0.5 * z.square().sum(-1) - self.log_s.sum()


def loss_fn(model, batch):
    theta, x = batch
    box = Uniform(-1.0, 1.0, validate_args=False)
    log_w = box.log_prob(theta).sum(-1)
    return -(model(theta, x) - 0.1 * log_w).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Flow()
    batches = []
    for step in range(4):
        theta = torch.rand(8, 2, generator=g) * 1.8 - 0.9
        if step == 2:
            theta[6, 1] = 1.2
        batches.append((theta, torch.randn(8, 4, generator=g)))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
