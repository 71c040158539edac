import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CASE = dict(
    id="hellinger_ckpt", title="Hellinger distance takes the root of probabilities inside a checkpointed block; a confident softmax underflows to exactly 0",
    source="mpariente/pytorch_stoi#14; pytorch/pytorch#2721", fidelity="adapted",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", op=["sqrt"],
    module="align.stage.1", line="return torch.sqrt(p) @ self.proto",
    fix="sqrt(p + 1e-8), or exp(0.5 * log_softmax).",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class Soft(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.fc = nn.Linear(d, k)

    def forward(self, x):
        return torch.softmax(self.fc(x), -1)


class RootMix(nn.Module):
    def __init__(self, k, d):
        super().__init__()
        self.proto = nn.Parameter(torch.randn(k, d) * 0.3)

    def forward(self, p):
        return torch.sqrt(p) @ self.proto


class Align(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage = nn.Sequential(Soft(8, 6), RootMix(6, 8))

    def forward(self, x):
        return checkpoint(self.stage, x, use_reentrant=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.align, self.out = nn.Linear(5, 8), Align(), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.align(self.inp(x)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 5, generator=g), torch.randint(0, 2, (8,), generator=g)) for _ in range(5)]
    batches[3][0][4] *= 900.0
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
