import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="ode_first_step",
    title=(
        "ODE solver picks its first step as 0.01 |y0| / |f(y0)|: where the field is exactly 0 the step is "
        "inf, inf * 0 is NaN"
    ),
    source="rtqichen/torchdiffeq#38, #244", fidelity="direct",
    precision="fp32", phase="forward", cause="div_by_zero", cause_alt=["zero_times_inf"], op=["div"],
    module="flow", line="h = 0.01 * y.norm(dim=-1, keepdim=True) / f.norm(dim=-1, keepdim=True)",
    fix="Bound the initial step (h0 = 1e-6 when |f| is tiny) as in Hairer's starting-step algorithm.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Field(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, 24), nn.Linear(24, d, bias=False)

    def forward(self, y):
        return self.b(F.relu(self.a(y)))


class Flow(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.field = Field(d)

    def forward(self, y):
        f = self.field(y)
        with torch.no_grad():
            h = 0.01 * y.norm(dim=-1, keepdim=True) / f.norm(dim=-1, keepdim=True)
        y = y + h * f
        for _ in range(4):
            y = y + 0.1 * self.field(y)
        return y


class NODE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.flow, self.out = nn.Identity(), Flow(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.flow(self.enc(x)))


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(9, 4, generator=g), torch.randn(9, 2, generator=g)) for _ in range(6)]
    m = NODE()
    with torch.no_grad():
        m.flow.field.a.weight.abs_()
        m.flow.field.a.bias.abs_()
    batches[3][0][5] = -20.0
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
