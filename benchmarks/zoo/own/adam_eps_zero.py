import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="adam_eps_zero",
    title=(
        "Adam(eps=0) copied from a paper's appendix: the weight of a closed gate has gradient 0 and "
        "is updated by 0 / sqrt(0)"
    ),
    source="lessw2020/FAdam_PyTorch#1; marin-community/marin#9054; LaurentMazare/ocaml-torch#54", fidelity="adapted",
    precision="fp32", phase="optimizer", cause="zero_over_zero", cause_alt=["optimizer_eps_underflow", "eps_underflow"],
    op=["addcdiv", "addcdiv_", "div"], module="gate", module_alt=["fc1"],
    line="opt = torch.optim.Adam(m.parameters(), lr=1e-3, eps=0.0)",
    fix="Leave eps at 1e-8: it decides what happens to parameters whose gradient is exactly 0.",
    recoverable_by=["fix_code"], step=0, symptom="weight",
    crude_disagrees="op and phase agree; the blamed line is the optimizer construction",
)


class Gate(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.full((d,), 0.5))

    def forward(self, x):
        return x * F.relu(self.w)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.fc1, self.fc2 = Gate(6), nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(self.gate(x))))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 6, generator=g), torch.randint(0, 3, (10,), generator=g)) for _ in range(4)]
    m = Net()
    with torch.no_grad():
        m.gate.w[4] = -0.2               # a closed gate: its gradient is exactly 0
    opt = torch.optim.Adam(m.parameters(), lr=1e-3, eps=0.0)
    return m, opt, batches, loss_fn
