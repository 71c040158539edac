import torch, torch.nn as nn

CASE = dict(
    id="sophia_dead_curvature", title="Own second-order optimizer divides the momentum by the curvature without eps: an embedding row that was never drawn has 0 / 0",
    source="own (second-order optimizers)", fidelity="analogue",
    precision="fp32", phase="optimizer", cause="zero_over_zero", op=["div"],
    module="emb", line="ratio = (m / (group[\"rho\"] * h)).clamp(-1, 1)", fix="Add an eps to the curvature.",
    recoverable_by=["fix_code"], step=0, loss_step=1, symptom="weight",
)


class Sophia(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, rho=0.04):
        super().__init__(params, dict(lr=lr, rho=rho))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["m"], s["h"] = torch.zeros_like(p), torch.zeros_like(p)
                m, h = s["m"].lerp_(p.grad, 0.1), s["h"].lerp_(p.grad.square(), 0.05)
                ratio = (m / (group["rho"] * h)).clamp(-1, 1)
                p.add_(ratio, alpha=-group["lr"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, i):
        return self.out(self.emb(i))


def loss_fn(model, batch):
    i, y = batch
    return nn.functional.cross_entropy(model(i), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randint(0, 8, (12,), generator=g), torch.randint(0, 3, (12,), generator=g)) for _ in range(4)]
    return m, Sophia(m.parameters()), batches, loss_fn
