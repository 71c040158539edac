import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="masked_log_softmax",
    title="Multi-head action space: the unit has no legal target, log_softmax of an all -inf row",
    source="entity-neural-network/incubator#186; Farama-Foundation/MicroRTS-Py#32",
    fidelity="adapted",
    precision="bf16",
    phase="forward",
    cause="masked_softmax_all_neg_inf",
    cause_alt=["inf_minus_inf"],
    op=["log_softmax"],
    module="heads.target",
    line="return F.log_softmax(logits, dim=1)",
    fix="Offer a no-op target, or mask with a finite number.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=4,
    symptom="loss",
)


class Head(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.fc = nn.Linear(16, n)

    def forward(self, h, legal):
        logits = self.fc(h).float()
        logits[~legal] = float("-inf")
        return F.log_softmax(logits, dim=1)


class Commander(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 16), nn.ReLU())
        self.heads = nn.ModuleDict({"verb": Head(4), "target": Head(6)})

    def forward(self, obs, legal):
        h = self.body(obs)
        return {name: head(h, legal[name]) for name, head in self.heads.items()}


def loss_fn(model, batch):
    logp = model(batch["obs"], batch["legal"])
    total = 0.0
    for name, choice in batch["choice"].items():
        total = total - (logp[name].gather(1, choice[:, None]).squeeze(1) * batch["gain"]).mean()
    return total


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        legal = {"verb": torch.rand(5, 4, generator=g) > 0.3, "target": torch.rand(5, 6, generator=g) > 0.4}
        choice = {}
        for name, mask in legal.items():
            choice[name] = torch.randint(0, mask.size(1), (5,), generator=g)
            mask[torch.arange(5), choice[name]] = True
        if i == 4:
            legal["target"][3] = False
        gain = torch.randn(5, generator=g)
        batches.append({"obs": torch.randn(5, 9, generator=g), "legal": legal, "choice": choice, "gain": gain})
    m = Commander()
    return m, torch.optim.RMSprop(m.parameters(), 1e-3), batches, loss_fn
