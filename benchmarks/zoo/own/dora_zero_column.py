import torch, torch.nn as nn, torch.nn.functional as F, torch.nn.utils.parametrize as parametrize

CASE = dict(
    id="dora_zero_column", title="DoRA divides the adapted weight by its column norm; a base column that was pruned to 0 with B = 0 gives 0 / 0",
    source="KohakuBlueleaf/LyCORIS#166; pytorch/pytorch#19126", fidelity="direct",
    precision="bf16", phase="forward", cause="division_by_near_zero_norm", cause_alt=["zero_over_zero"], op=["div"],
    module="blocks.1.fc.parametrizations.weight.0", module_alt=["blocks.1.fc", "blocks.1"], line="return self.mag * v / v.norm(dim=0, keepdim=True)",
    fix="Add eps to the column norm.",
    recoverable_by=["fix_code", "fix_data"], step=0, symptom="loss",
)


class DoRA(nn.Module):
    def __init__(self, w, r=2):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(r, w.size(1)) * 0.1), nn.Parameter(torch.zeros(w.size(0), r))
        self.mag = nn.Parameter(w.norm(dim=0, keepdim=True).detach().clone())

    def forward(self, w):
        v = w + self.b @ self.a
        return self.mag * v / v.norm(dim=0, keepdim=True)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x):
        return x + F.gelu(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(12), Block(12)]), nn.Linear(12, 3)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 12, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(4)]
    m = Net()
    with torch.no_grad():
        m.blocks[1].fc.weight[:, 5] = 0.0
    m.requires_grad_(False)
    m.head.requires_grad_(True)
    for b in m.blocks:
        parametrize.register_parametrization(b.fc, "weight", DoRA(b.fc.weight))
    return m, torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-3), batches, loss_fn
