import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="adamax_half", title="Adamax on a half-precision table: eps 1e-8 is 0 in fp16, the infinity norm of a row that was never drawn is 0 and the update 0 / 0",
    source="google-deepmind/optax#1754, #1789; pytorch/pytorch#8860", fidelity="adapted",
    precision="fp16", phase="optimizer", cause="optimizer_eps_underflow", cause_alt=["eps_underflow", "zero_over_zero"], op=["addcdiv", "addcdiv_", "div"],
    module="user.table", line="opt = torch.optim.Adamax(m.parameters(), lr=2e-3)",
    fix="eps=1e-4 for half parameters, or fp32 master weights.",
    recoverable_by=["fp32", "fix_code"], step=0, symptom="weight",
    recover_note="the table is .half(): the fp32 remedy means fp32 parameters / master weights",
    crude_disagrees="op and phase agree; the blamed line is the optimizer construction, the executing line lies inside torch.optim",
)


class Side(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.table, self.fc = nn.Embedding(n, 8), nn.Linear(8, 8)

    def forward(self, ids):
        return self.fc(self.table(ids).float())


class MF(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Side(50), Side(20)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1)


def loss_fn(model, batch):
    u, i, r = batch
    return F.binary_cross_entropy_with_logits(model(u, i).float(), r)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randint(0, 40, (16,), generator=g), torch.randint(0, 20, (16,), generator=g), (torch.rand(16, generator=g) > 0.5).float()) for _ in range(4)]
    m = MF()
    m.user.table.half()
    opt = torch.optim.Adamax(m.parameters(), lr=2e-3)
    return m, opt, batches, loss_fn
