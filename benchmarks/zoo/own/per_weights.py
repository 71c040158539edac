import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="per_weights",
    title=(
        "Prioritised replay: the importance weight is (N p)^-beta; a transition with TD error 0 has "
        "priority 0, 0^-0.4 is inf"
    ),
    source="Guillaume-Cr/lunar_lander_per#2; rlcode/per#4; philtabor/ProtoRL#5", fidelity="direct",
    precision="fp32", phase="forward", cause="div_by_zero", op=["pow"],
    module="", line="w = (N_REPLAY * prob).pow(-BETA)",
    fix="Add a small constant to every priority before it is stored.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)

N_REPLAY, BETA = 1000, 0.4


def is_weights(priority):
    prob = priority / priority.sum()
    w = (N_REPLAY * prob).pow(-BETA)
    return w / w.max()


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.adv, self.val = nn.Linear(6, 24), nn.Linear(24, 4), nn.Linear(24, 1)

    def forward(self, s):
        h = F.relu(self.trunk(s))
        a = self.adv(h)
        return self.val(h) + a - a.mean(-1, keepdim=True)


def loss_fn(model, batch):
    s, a, target, priority = batch
    q = model(s).gather(1, a[:, None]).squeeze(1)
    td = F.smooth_l1_loss(q, target, reduction="none")
    return (is_weights(priority) * td).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        priority = torch.rand(16, generator=g) + 0.05
        if i == 3:
            priority[11] = 0.0
        a, target = torch.randint(0, 4, (16,), generator=g), torch.randn(16, generator=g)
        batches.append((torch.randn(16, 6, generator=g), a, target, priority))
    m = Dueling()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
