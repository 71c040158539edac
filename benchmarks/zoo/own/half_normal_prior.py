import torch, torch.nn as nn
from torch.distributions import HalfNormal

CASE = dict(
    id="half_normal_prior", title="MAP training with a HalfNormal prior on a raw scale parameter: an update makes the scale negative, outside of the prior's support its log density is -inf",
    source="own (constrained parameters without a transform)", fidelity="analogue",
    precision="fp32", phase="forward", cause="nonfinite_constant", cause_alt=["log_of_zero"], op=["where"],
    module="", line="prior.log_prob(model.scale)", fix="Train the log of the scale.",
    recoverable_by=["fix_code"], step=2, symptom="loss",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor([0.05, 1.0]))

    def forward(self, x):
        return self.lin(x).squeeze(-1) * self.scale[0]


prior = HalfNormal(1.0, validate_args=False)


def loss_fn(model, batch):
    x, y = batch
    fit = (model(x) - y).square().mean() + 1.0 * model.scale[0]
    return fit - 0.01 * prior.log_prob(model.scale).sum()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(8, 3, generator=g), torch.zeros(8)) for _ in range(5)]
    return m, torch.optim.SGD(m.parameters(), 0.03), batches, loss_fn
