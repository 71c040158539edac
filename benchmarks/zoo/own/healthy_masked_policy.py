import torch, torch.nn as nn
from torch.distributions import Categorical

CASE = dict(
    id="healthy_masked_policy", title="Illegal actions have logits of -inf; log_prob and entropy of Categorical are finite for the legal ones",
    source="own (action masking)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi, self.v = nn.Linear(4, 5), nn.Linear(4, 1)

    def forward(self, s, legal):
        return Categorical(logits=self.pi(s).masked_fill(~legal, float("-inf"))), self.v(s).squeeze(-1)


def loss_fn(model, batch):
    s, legal, a, ret = batch
    d, v = model(s, legal)
    return -(d.log_prob(a) * (ret - v.detach())).mean() + (ret - v).square().mean() - 0.01 * d.entropy().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Policy()
    batches = []
    for _ in range(6):
        legal = torch.rand(8, 5, generator=g) > 0.4
        legal[:, 0] = True
        batches.append((torch.randn(8, 4, generator=g), legal, torch.zeros(8, dtype=torch.long), torch.randn(8, generator=g)))
    return m, torch.optim.Adam(m.parameters(), 1e-2), batches, loss_fn
