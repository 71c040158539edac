import torch, torch.nn as nn

CASE = dict(
    id="fm_raw_counts", title="Factorisation machine on raw interaction counts with SGD lr 0.01: the pairwise term doubles its own gradient and the factors explode within a few steps",
    source="pytorch/tutorials#847; gurkirt/FPN.pytorch1.0#7 (lower the rate)", fidelity="adapted",
    precision="bf16", phase="forward", phase_alt=["backward"], cause="gradient_explosion", cause_alt=["overflow_any_precision"],
    op=["mm", "addmm", "linear", "matmul", "pow", "square", "mul", "sub", "sum"], module="", module_alt=["fm", "fm.pair"], line="return (model.fm(x).float() - y).square().mean()",
    fix="Normalise the features, lower the learning rate, clip the gradient norm.",
    recoverable_by=["clip", "lower_lr", "fix_data"], step=9, symptom="loss", seeds=[0],
    crude_disagrees="explosion is a process over steps; which op overflows first is an accident",
)


class Pair(nn.Module):
    def __init__(self, n, k):
        super().__init__()
        self.v = nn.Parameter(torch.randn(n, k) * 0.1)

    def forward(self, x):
        s = (x @ self.v).square() - x.square() @ self.v.square()
        return 0.5 * s.sum(-1)


class FM(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.lin, self.pair = nn.Linear(n, 1), Pair(n, 6)

    def forward(self, x):
        return self.lin(x).squeeze(-1) + self.pair(x)


class Rec(nn.Module):
    def __init__(self):
        super().__init__()
        self.fm = FM(12)


def loss_fn(model, batch):
    x, y = batch
    return (model.fm(x).float() - y).square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(16, 12, generator=g) * 3, torch.rand(16, generator=g) * 5) for _ in range(40)]
    m = Rec()
    return m, torch.optim.SGD(m.parameters(), lr=0.01), batches, loss_fn
