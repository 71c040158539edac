import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="unit_grad_hook",
    title="A gradient hook normalises the gradient of the shared trunk, g / |g|; when both heads are masked out g is 0",
    source="own (hand-written gradient normalisation in a tensor hook)", fidelity="adapted",
    precision="fp32", phase="backward", cause="zero_over_zero", cause_alt=["division_by_near_zero_norm"],
    op=["div"], module="trunk", line="return grad / grad.norm()",
    fix="Divide by grad.norm().clamp(min=1e-8).",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


def unit_gradient(grad):
    return grad / grad.norm()


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ELU())

    def forward(self, x):
        h = self.net(x)
        if h.requires_grad:
            h.register_hook(unit_gradient)
        return h


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.heads = nn.ModuleDict({"depth": nn.Linear(12, 1), "normal": nn.Linear(12, 3)})

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}


def loss_fn(model, batch):
    out = model(batch["x"])
    total = 0.0
    for name, pred in out.items():
        valid = batch["valid"][name]
        err = F.l1_loss(pred, batch["target"][name], reduction="none").mean(-1)
        total = total + (err * valid).sum() / valid.sum().clamp(min=1.0)
    return total


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        seen = 0.0 if i == 3 else 1.0
        batches.append({
            "x": torch.randn(6, 6, generator=g),
            "target": {"depth": torch.rand(6, 1, generator=g), "normal": torch.randn(6, 3, generator=g)},
            "valid": {"depth": torch.full((6,), seen), "normal": torch.full((6,), seen)},
        })
    model = MultiTask()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
