import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="mixup_banned_class", title="cross_entropy with soft targets from mixup on logits that hold -inf for absent classes: 0 * -inf",
    source="google-deepmind/optax#896; OpenBMB/ModelCenter#14", fidelity="analogue",
    precision="fp32", phase="forward", cause="zero_times_inf", op=["mul", "cross_entropy", "cross_entropy_loss"],
    module="head", line="F.cross_entropy(logits, soft)", fix="Mask with a large negative finite number.",
    recoverable_by=["fix_code", "skip"], step=1, symptom="loss",
)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(12, 6)

    def forward(self, h, present, soft):
        logits = self.lin(h)
        logits[:, ~present] = float("-inf")
        return F.cross_entropy(logits, soft)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(7, 12), nn.Tanh())
        self.head = Head()

    def forward(self, x, present, soft):
        return self.head(self.enc(x), present, soft)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(3):
        present = torch.ones(6, dtype=torch.bool)
        if step == 1:
            present[5] = False
        y = F.one_hot(torch.randint(0, 5, (10,), generator=g), 6).float()
        lam = torch.rand(10, 1, generator=g)
        batches.append((torch.randn(10, 7, generator=g), present, lam * y + (1 - lam) * y.flip(0)))
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 0.1), batches, loss_fn
