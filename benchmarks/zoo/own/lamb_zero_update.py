import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="lamb_zero_update",
    title=(
        "Hand-written LAMB without the guard: a layer whose update is 0 gets trust ratio |w| / 0 = inf, inf "
        "* 0 is NaN"
    ),
    source="cybertronai/pytorch-lamb#6; stockeh/mlx-optimizers#36; mosaicml/composer#967", fidelity="direct",
    precision="fp32", phase="optimizer", cause="div_by_zero", cause_alt=["zero_times_inf", "zero_over_zero"],
    op=["div", "mul", "add", "add_"], module="experts.2.fc",
    line="trust = p.norm() / update.norm()",
    fix="Set the trust ratio to 1 where the weight norm or the update norm is 0.",
    recoverable_by=["fix_code"], step=3, symptom="weight",
)


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                update = state["m"] / (state["v"].sqrt() + group["eps"])
                trust = p.norm() / update.norm()
                p.add_(update * trust, alpha=-group["lr"])


class Expert(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc = nn.Linear(d, d, bias=False)

    def forward(self, x):
        return torch.relu(self.fc(x))


class MoE(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.experts = nn.ModuleList([Expert(d) for _ in range(3)])
        self.out = nn.Linear(d, 2, bias=False)

    def forward(self, x, active):
        h = sum(self.experts[i](x) for i in active)
        return self.out(h)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["x"], batch["active"]), batch["y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        active = (0, 1, 2) if i >= 3 else (0, 1)
        x = torch.rand(10, 8, generator=g)
        batches.append({"x": x, "y": torch.randint(0, 2, (10,), generator=g), "active": active})
    model = MoE()
    with torch.no_grad():
        model.experts[2].fc.weight.abs_().neg_()  # the new expert is dead on positive features
    return model, Lamb(model.parameters(), 1e-2), batches, loss_fn
