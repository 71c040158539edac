import torch
import torch.nn as nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution

CASE = dict(
    id="tanh_expert_action",
    title="Behaviour cloning with a tanh-squashed Gaussian: an expert action clipped to exactly 1.0 is atanh(1) = inf",
    source="rlworkgroup/garage#2129",
    fidelity="direct",
    precision="fp32",
    phase="forward",
    phase_alt=["data"],
    cause="acos_asin_domain",
    cause_alt=["inf_minus_inf", "label_out_of_domain"],
    op=["atanh", "sub", "add"],
    module="",
    line='logp = dist.log_prob(batch["demo"]["action"]).sum(-1)',
    fix="Clip the demonstrated actions to (-1 + eps, 1 - eps).",
    recoverable_by=["skip", "fix_data", "fix_code"],
    step=3,
    symptom="loss",
)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
        self.mean = nn.Linear(16, 3)
        self.log_std = nn.Parameter(torch.zeros(3))

    def forward(self, obs):
        base = Normal(self.mean(self.trunk(obs)), self.log_std.exp())
        return TransformedDistribution(base, [TanhTransform()])


def loss_fn(model, batch):
    dist = model(batch["demo"]["obs"])
    logp = dist.log_prob(batch["demo"]["action"]).sum(-1)
    return -(logp * batch["weight"]).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        action = torch.tanh(torch.randn(7, 3, generator=g))
        if i == 3:
            action[2, 1] = 1.0
        demo = {"obs": torch.randn(7, 5, generator=g), "action": action}
        batches.append({"demo": demo, "weight": torch.rand(7, generator=g)})
    m = Policy()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
