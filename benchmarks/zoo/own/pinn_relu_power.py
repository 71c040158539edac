import torch, torch.nn as nn

CASE = dict(
    id="pinn_relu_power",
    title=(
        "Physics-informed net with activation relu(x)^1.5: the second derivative needs relu(x)^-0.5, inf "
        "where a unit is off"
    ),
    source="lululxvi/deepxde#80; ComputationalDomain/PINNs#1", fidelity="adapted",
    precision="fp32", phase="backward", phase_alt=["forward"], cause="sqrt_grad_at_zero",
    cause_alt=["zero_times_inf", "div_by_zero"], op=["pow", "mul"],
    module="u.act", line="return torch.relu(z) ** 1.5",
    fix="Use a smooth activation (tanh, or softplus based powers) when second derivatives are needed.",
    recoverable_by=["fix_code"], step=0, symptom="grad",
)


class ReLU15(nn.Module):
    def forward(self, z):
        return torch.relu(z) ** 1.5


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.act, self.l2 = nn.Linear(1, 16), ReLU15(), nn.Linear(16, 1)

    def forward(self, x):
        return self.l2(self.act(self.l1(x)))


class PINN(nn.Module):
    def __init__(self):
        super().__init__()
        self.u = Field()

    def forward(self, x):
        return self.u(x)


def residual(model, x):
    x = x.clone().requires_grad_(True)
    u = model(x)
    ux, = torch.autograd.grad(u.sum(), x, create_graph=True)
    uxx, = torch.autograd.grad(ux.sum(), x, create_graph=True)
    return uxx + u


def loss_fn(model, batch):
    return residual(model, batch).pow(2).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.rand(12, 1, generator=g) for _ in range(5)]
    m = PINN()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
