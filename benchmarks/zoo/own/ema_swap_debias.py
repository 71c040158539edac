import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="ema_swap_debias",
    title="Averaged weights are copied back before the average was ever updated: 0 / (1 - decay ** 0) is NaN",
    source="own", fidelity="adapted",
    precision="fp32", phase="parameter", cause="parameter_corrupted", cause_alt=["zero_over_zero"],
    op=["div"], module="policy.mlp.0", module_alt=["policy", "policy.mlp", "policy.mlp.2", ""],
    line="p.copy_(s / (1 - self.decay ** self.updates))",
    fix="Copy back only after the first update (or initialise the average with the weights).",
    recoverable_by=["fix_code"], step=3, symptom="loss",
)


class WeightAverage:
    def __init__(self, module, decay=0.99):
        self.decay = decay
        self.updates = 0
        self.shadow = copy.deepcopy(module)
        for p in self.shadow.parameters():
            p.data.zero_()

    @torch.no_grad()
    def update(self, module):
        self.updates += 1
        for s, p in zip(self.shadow.parameters(), module.parameters(), strict=True):
            s.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, module):
        for s, p in zip(self.shadow.parameters(), module.parameters(), strict=True):
            p.copy_(s / (1 - self.decay ** self.updates))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = Policy()
        self.value = nn.Linear(4, 1)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        obs = torch.randn(10, 4, generator=g)
        act = torch.randint(0, 2, (10,), generator=g)
        batches.append({"obs": obs, "act": act, "ret": torch.randn(10, generator=g), "reset": i == 3})
    agent = Agent()
    average = WeightAverage(agent.policy)

    def loss_fn(model, batch):
        if batch["reset"]:
            average.copy_to(model.policy)
        value = model.value(batch["obs"]).squeeze(-1)
        logp = F.log_softmax(model.policy.mlp(batch["obs"]), -1)
        chosen = logp.gather(1, batch["act"][:, None]).squeeze(1)
        return -(chosen * (batch["ret"] - value.detach())).mean() + F.mse_loss(value, batch["ret"])

    return agent, torch.optim.Adam(agent.parameters(), 3e-3), batches, loss_fn
