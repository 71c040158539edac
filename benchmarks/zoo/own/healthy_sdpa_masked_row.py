import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="healthy_sdpa_masked_row",
    title="Fused attention with a row that may see nothing: the kernel returns 0 for that row, gradients are finite",
    source="pytorch/pytorch#41508 (fixed behaviour of scaled_dot_product_attention)",
    fidelity="control",
    precision="fp32",
    phase="none",
    cause="none",
    op=[],
    module="",
    line="",
    fix="nothing to fix",
    recoverable_by=[],
    step=None,
)


class Attn(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x, visible):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None]).transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.attn = Attn(8, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x, visible):
        h = self.inp(x)
        return self.out(h + self.attn(h, visible)).mean(1)


def loss_fn(model, batch):
    x, length, y = batch
    keep = torch.arange(x.size(1))[None] < length[:, None]
    return F.cross_entropy(model(x, keep[:, None, :] & keep[:, :, None]), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(8):
        length = torch.randint(0, 7, (5,), generator=g)
        batches.append((torch.randn(5, 6, 4, generator=g), length, torch.randint(0, 3, (5,), generator=g)))
    m = Net()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
