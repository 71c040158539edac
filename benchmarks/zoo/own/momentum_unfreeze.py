import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="momentum_unfreeze",
    title=(
        "Resume code allocates missing momentum buffers without filling them; the backbone is unfrozen "
        "after the restart"
    ),
    source="bitsandbytes-foundation/bitsandbytes#1382; NVIDIA-NeMo/RL#3544; KempnerInstitute/KempnerForge#115",
    fidelity="adapted",
    precision="fp32", phase="optimizer", cause="optimizer_state_corrupted", cause_alt=["uninitialized_memory"],
    op=["mul", "mul_", "add", "add_", "foreach_mul", "foreach_add"],
    module="backbone.1", line='opt.state[p]["momentum_buffer"] = recycled_like(p)',
    fix="Allocate missing momentum buffers with zeros_like (or drop the entry and let SGD create it).",
    recoverable_by=["fix_code", "fix_data"], step=3, symptom="weight",
    crude_disagrees="op and phase agree; the blamed line restores the state, the update runs inside torch.optim",
)


def recycled_like(p):
    """stands for torch.empty_like(): what an earlier fp32 loss tensor left in the block (0x7FC00000 = NaN)"""
    pattern = torch.tensor([0x3A83126F, 0x00000000, 0x7FC00000, 0x3B03126F], dtype=torch.int32)
    return pattern.repeat(p.numel() // 4 + 1)[:p.numel()].view(torch.float32).view_as(p).clone()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleList([nn.Linear(7, 12), nn.Linear(12, 12)])
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        for layer in self.backbone:
            x = F.relu(layer(x))
        return self.head(x)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 7, generator=g), torch.randint(0, 3, (10,), generator=g), i) for i in range(6)]
    m = Net()
    opt = torch.optim.SGD(m.parameters(), 0.02, momentum=0.9)
    m.backbone[1].requires_grad_(False)

    def loss_fn(model, batch):
        x, y, i = batch
        if i == 3:
            model.backbone[1].requires_grad_(True)
            for p in model.parameters():
                if "momentum_buffer" not in opt.state[p]:
                    opt.state[p]["momentum_buffer"] = recycled_like(p)
        return F.cross_entropy(model(x), y)

    return m, opt, batches, loss_fn
