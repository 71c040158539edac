import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="shampoo_dead_layer", title="Shampoo raises its (diagonal) statistics to -1/4 without damping: a layer whose gradient is still 0 gets inf * 0",
    source="facebookresearch/optimizers#147; microsoft/dion#24", fidelity="adapted",
    precision="bf16", phase="optimizer", cause="div_by_zero", cause_alt=["zero_times_inf"], op=["pow"],
    module="ctrl.zero", line="root = stat.pow(-0.25)",
    fix="Add epsilon to the statistics before the inverse root.",
    recoverable_by=["fix_code"], step=0, symptom="weight",
)


def inv_root(stat):
    root = stat.pow(-0.25)
    return root


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                if g.dim() == 2 and min(g.shape) == g.size(0) and g.size(0) <= 4:
                    st = self.state[p]
                    st["L"] = st.get("L", torch.zeros(g.size(0), 1)) + g.square().sum(1, keepdim=True)
                    g = inv_root(st["L"]) * g
                p.add_(g, alpha=-group["lr"])


class Control(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.cond, self.gain = nn.Linear(d, d), nn.Parameter(torch.zeros(1))
        self.zero = nn.Linear(d, 4)

    def forward(self, c):
        return self.gain * self.zero(F.silu(self.cond(c)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.ctrl, self.out = nn.Linear(12, 4), Control(10), nn.Linear(4, 3)

    def forward(self, x, c):
        return self.out(torch.tanh(self.base(x)) + self.ctrl(c))


def loss_fn(model, batch):
    x, c, y = batch
    return F.cross_entropy(model(x, c), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(12, 12, generator=g), torch.randn(12, 10, generator=g), torch.randint(0, 3, (12,), generator=g)) for _ in range(4)]
    m = Net()
    m.base.requires_grad_(False)
    return m, Shampoo(m.parameters(), 0.01), batches, loss_fn
