import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="requant_zero_channel",
    title=(
        "Adapter weights are re-quantised on load with scale max|w| / 127: an output channel that was "
        "pruned to 0 gives 0 / 0"
    ),
    source="apple/coremltools#2853; pytorch/ao#4713; ml-explore/mlx#1028", fidelity="direct",
    precision="fp32", phase="parameter", cause="parameter_corrupted", cause_alt=["zero_over_zero"],
    op=["linear", "addmm", "mm"], module="experts.2", line="codes = torch.round(w / scale)",
    fix="Use scale 1 for channels whose maximum is 0 before the division.",
    recoverable_by=["fix_code"], step=0, loss_step=4, symptom="weight",
)


@torch.no_grad()
def requantise(linear):
    w = linear.weight
    scale = w.abs().amax(1, keepdim=True) / 127
    codes = torch.round(w / scale)
    w.copy_(codes * scale)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 10)
        self.experts = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.out = nn.Linear(10, 3)

    def forward(self, x, which):
        h = F.gelu(self.inp(x))
        return self.out(h + self.experts[which](h))


def loss_fn(model, batch):
    x, which, y = batch
    return F.cross_entropy(model(x, which), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        which = 2 if i == 4 else i % 2
        batches.append((torch.randn(8, 6, generator=g), which, torch.randint(0, 3, (8,), generator=g)))
    m = Router()
    with torch.no_grad():
        m.experts[2].weight[7].zero_()
    for e in m.experts:
        requantise(e)
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
