import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CASE = dict(
    id="reentrant_signed_root",
    title=(
        "Reentrant checkpoint around a signed-root pooling |x|^0.5 * sign(x): a channel that is exactly 0 "
        "has slope inf"
    ),
    source="own (signed square root of bilinear pooling)", fidelity="adapted",
    precision="bf16", phase="backward", cause="sqrt_grad_at_zero", cause_alt=["zero_times_inf"], op=["pow"],
    module="pool.root", line="return x.abs().pow(0.5) * x.sign()",
    fix="(x.abs() + 1e-6).pow(0.5) * x.sign().",
    recoverable_by=["skip", "fix_code"], step=2, symptom="grad",
)


class SignedRoot(nn.Module):
    def forward(self, x):
        return x.abs().pow(0.5) * x.sign()


class BilinearPool(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.mix = nn.Conv2d(c, c, 1, bias=False)
        self.root = SignedRoot()

    def forward(self, x):
        f = self.mix(x).float().flatten(2)
        return self.root(f @ f.transpose(1, 2) / f.size(-1)).flatten(1)


class Fine(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.pool = BilinearPool(4)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        h = F.relu(self.stem(x))
        return self.out(checkpoint(self.pool, h, use_reentrant=True))


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).float(), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(3, 3, 6, 6, generator=g), torch.randint(0, 5, (3,), generator=g)) for _ in range(4)]
    batches[2][0][1] = 0.0  # a black image
    model = Fine()
    return model, torch.optim.AdamW(model.parameters(), 1e-3), batches, loss_fn
