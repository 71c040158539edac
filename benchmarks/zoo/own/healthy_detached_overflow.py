import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="healthy_detached_overflow",
    title="fp16 statistics overflow to inf and are clamped before use; 1 / (1 + inf) closes a gate",
    source="own (clamped overflow); compare huggingface/transformers#19229",
    fidelity="control",
    precision="fp16",
    phase="none",
    cause="none",
    op=[],
    module="",
    line="",
    fix="nothing to fix",
    recoverable_by=[],
    step=None,
)


class Gate(nn.Module):
    def forward(self, h):
        energy = h.detach().square().sum(-1, keepdim=True)  # inf in fp16 for a loud frame
        return torch.exp(-energy.clamp(max=1e4) / 1e4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 16)
        self.gate = Gate()
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        h = self.inp(x)
        damp = 1.0 / (1.0 + torch.exp(h.detach().amax(-1, keepdim=True)))  # 1 / inf = 0 is the right answer
        return self.out(self.norm(h) * self.gate(h) + damp)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(6, 6, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(8)]
    for x, _ in batches[2:]:
        x[1] *= 600.0
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
