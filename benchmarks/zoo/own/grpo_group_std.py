import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="grpo_group_std",
    title="Group-relative advantages divide by the standard deviation of a group whose answers all got the same reward",
    source="own (GRPO without an eps in the group normalisation)",
    fidelity="adapted",
    precision="bf16",
    phase="forward",
    cause="zero_over_zero",
    op=["div"],
    module="",
    line="advantage = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)",
    fix="Add 1e-4 to the standard deviation (a group without contrast gets advantage 0).",
    recoverable_by=["skip", "fix_code"],
    step=3,
    symptom="loss",
)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(20, 12)
        self.core = nn.GRU(12, 12, batch_first=True)
        self.lm_head = nn.Linear(12, 20)

    def forward(self, ids):
        return self.lm_head(self.core(self.tok(ids))[0])


@torch.no_grad()
def group_advantage(reward):
    advantage = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)
    return advantage.flatten()


def loss_fn(model, batch):
    ids, reward = batch
    logits = model(ids[:, :-1]).float()
    logp = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return -(logp.mean(1) * group_advantage(reward)).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        reward = torch.rand(3, 4, generator=g).round(decimals=1)
        if i == 3:
            reward[1] = 1.0  # the easy question: all four answers are right
        batches.append((torch.randint(0, 20, (12, 7), generator=g), reward))
    m = Policy()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
