import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="cosine_lr_no_decay",
    title=(
        "Cosine schedule with warmup_steps == total_steps: progress is 0 / 0 at the boundary and the "
        "learning rate is NaN"
    ),
    source="mlcommons/hpc#27; karpathy/nanoGPT#691; mosaicml/composer#1077", fidelity="direct",
    precision="fp32", phase="optimizer", cause="zero_over_zero", cause_alt=["optimizer_state_corrupted"],
    op=["div", "add", "add_", "addcdiv", "addcdiv_", "mul", "mul_"],
    module="", module_alt=["blocks", "blocks.0", "blocks.1", "blocks.0.lin", "blocks.1.lin", "out"],
    line="progress = (step - WARMUP) / (TOTAL - WARMUP)",
    fix="Divide by max(1, total - warmup).",
    recoverable_by=["fix_code"], step=4, symptom="weight",
)
WARMUP = torch.tensor(4.0)
TOTAL = torch.tensor(4.0)


def learning_rate(step, base):
    step = torch.tensor(float(step))
    if step < WARMUP:
        return float(base * (step + 1) / WARMUP)
    progress = (step - WARMUP) / (TOTAL - WARMUP)
    return float(0.5 * base * (1 + torch.cos(torch.pi * progress)))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)

    def forward(self, x):
        return x + F.silu(self.lin(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        batches.append((i, torch.randn(12, 8, generator=g), torch.randint(0, 2, (12,), generator=g)))
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def loss_fn(net, batch):
        step, x, y = batch
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, 0.05)
        return F.cross_entropy(net(x), y)

    return model, opt, batches, loss_fn
