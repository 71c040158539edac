import torch, torch.nn as nn
from torch.distributions import Categorical, kl_divergence

CASE = dict(
    id="kl_outside_support", title="KL of the policy to a demonstrator with zero probability for some action is infinite: torch writes the infinity itself",
    source="own (kl_divergence of Categorical)", fidelity="analogue",
    precision="fp32", phase="forward", cause="nonfinite_constant", cause_alt=["log_of_zero", "div_by_zero"], op=["index_put"],
    module="", line="kl_divergence(Categorical(logits=logits), Categorical(probs=demo))", fix="Mix a little uniform probability into the demonstrator.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=1, symptom="loss",
)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, s):
        return self.net(s)


def loss_fn(model, batch):
    s, demo = batch
    logits = model(s)
    return kl_divergence(Categorical(logits=logits), Categorical(probs=demo)).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Policy()
    batches = []
    for step in range(3):
        demo = torch.rand(6, 4, generator=g) + 0.1
        if step == 1:
            demo[2, 3] = 0.0
        batches.append((torch.randn(6, 5, generator=g), demo))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
