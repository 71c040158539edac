import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="adafactor_dead_rows",
    title="Own Adafactor divides the row statistic by its mean without eps: an all-zero gradient gives 0 / 0",
    source="microsoft/LLM2CLIP#64", fidelity="direct",
    precision="bf16", phase="optimizer", cause="zero_over_zero", cause_alt=["div_by_zero"],
    op=["div"], module="text.proj", line="r = (row / row.mean()).rsqrt().unsqueeze(1)",
    fix="Add eps1 (1e-30) to the squared gradient before the factored statistics, as in the paper.",
    recoverable_by=["fix_code"], step=3, symptom="weight",
)


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params, lr, decay=0.8):
        super().__init__(params, dict(lr=lr, decay=decay))

    def factored(self, p, state, decay):
        sq = p.grad.pow(2)
        row = state.setdefault("row", torch.zeros(p.size(0)))
        col = state.setdefault("col", torch.zeros(p.size(1)))
        row.lerp_(sq.mean(1), 1 - decay)
        col.lerp_(sq.mean(0), 1 - decay)
        r = (row / row.mean()).rsqrt().unsqueeze(1)
        return p.grad * r * col.rsqrt()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() == 2:
                    p.sub_(self.factored(p, self.state[p], group["decay"]), alpha=group["lr"])
                else:
                    p.sub_(p.grad, alpha=group["lr"])


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 8)

    def forward(self, t):
        return torch.tanh(self.proj(t))


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(10, 8)
        self.text = Text()
        self.head = nn.Linear(8, 3)

    def forward(self, img, txt, txt_weight):
        h = torch.tanh(self.image(img))
        if txt is not None:
            h = h + txt_weight * self.text(txt)
        return self.head(h)


def loss_fn(model, batch):
    logits = model(batch["img"], batch.get("txt"), batch.get("weight"))
    return F.cross_entropy(logits.float(), batch["y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        batch = {"img": torch.randn(8, 10, generator=g), "y": torch.randint(0, 3, (8,), generator=g)}
        if i >= 3:  # captions join, their weight starts at 0
            batch["txt"] = torch.randn(8, 6, generator=g)
            batch["weight"] = float(i - 3)
        batches.append(batch)
    model = Clip()
    return model, Adafactor(model.parameters(), 1e-3), batches, loss_fn
