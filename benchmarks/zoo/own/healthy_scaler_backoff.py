import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="healthy_scaler_backoff",
    title="GradScaler starts too high: the first steps overflow and are skipped, then training is normal",
    source="NVIDIA/tacotron2#112 (attempted loss scale decays, then training runs)", fidelity="control",
    precision="fp16", phase="none", cause="none", cause_alt=["loss_scale_overflow"], op=[], module="", line="",
    fix="nothing to fix", recoverable_by=[], step=None, loop="scaler",
)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 16)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** 19)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(12, 6, generator=g), torch.randint(0, 3, (12,), generator=g)) for _ in range(10)]
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), 1e-3), batches, loss_fn
