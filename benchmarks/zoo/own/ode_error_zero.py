import torch, torch.nn as nn

CASE = dict(
    id="ode_error_zero", title="Adaptive solver scales its step by (tol / err) ** 0.2: where two stages agree exactly the error is 0 and the step infinite",
    source="own (adaptive solvers)", fidelity="analogue",
    precision="fp32", phase="forward", cause="div_by_zero", op=["div", "reciprocal"],
    module="solver", line="factor = (1e-3 / err) ** 0.2", fix="Clamp the error away from 0.",
    recoverable_by=["fix_code", "skip"], step=1, symptom="loss",
)


class Solver(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(3, 3)

    def forward(self, y):
        h = torch.full((y.shape[0], 1), 0.1)
        for _ in range(3):
            k1 = torch.relu(self.f(y))
            k2 = torch.relu(self.f(y + h * k1))
            err = (h * (k2 - k1)).abs().amax(-1, keepdim=True)
            factor = (1e-3 / err) ** 0.2
            h = h * factor
            y = y + h * k1
        return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.solver, self.out = Solver(), nn.Linear(3, 1)

    def forward(self, y):
        return self.out(self.solver(y))


def loss_fn(model, batch):
    y, t = batch
    return (model(y) - t).square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    with torch.no_grad():
        m.solver.f.weight.copy_(torch.eye(3))
        m.solver.f.bias.fill_(0.1)
    batches = []
    for step in range(3):
        y = torch.rand(5, 3, generator=g) + 0.1
        if step == 1:
            y[2] = -5.0
        batches.append((y, torch.randn(5, 1, generator=g)))
    return m, torch.optim.Adam(m.parameters(), 1e-4), batches, loss_fn
