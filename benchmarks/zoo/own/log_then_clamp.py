import torch, torch.nn as nn

CASE = dict(
    id="log_then_clamp", title="Hand-written BCE clamps the logarithm instead of its argument: forward is finite, backward multiplies the clamp's 0 by 1 / 0",
    source="own (torch.log(p).clamp(min=-100) in many repositories)", fidelity="direct",
    precision="fp32", phase="backward", phase_alt=["forward"], cause="log_of_zero", cause_alt=["zero_times_inf", "zero_over_zero"], op=["log"],
    module="crit", line="torch.log(p).clamp(min=-100)", fix="Clamp the probability, or use binary_cross_entropy_with_logits.",
    recoverable_by=["fix_code", "skip"], step=1, symptom="grad",
)


class Bce(nn.Module):
    def forward(self, p, y):
        pos = torch.log(p).clamp(min=-100)
        neg = torch.log1p(-p.clamp(max=1 - 1e-6))
        return -(y * pos + (1 - y) * neg).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.crit = nn.Linear(4, 1), Bce()

    def forward(self, x, y):
        return self.crit(torch.sigmoid(self.lin(x)).squeeze(-1), y)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    with torch.no_grad():
        m.lin.weight.fill_(1.0)
    batches = []
    for step in range(3):
        x, y = torch.randn(8, 4, generator=g), torch.randint(0, 2, (8,), generator=g).float()
        if step == 1:
            x[2], y[2] = -60.0, 1.0
        batches.append((x, y))
    return m, torch.optim.SGD(m.parameters(), 1e-3), batches, loss_fn
