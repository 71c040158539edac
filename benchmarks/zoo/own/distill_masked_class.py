import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="distill_masked_class",
    title=(
        "Distillation cross-entropy -(t log p): the student masks classes of other tasks with -inf, the "
        "teacher gives them 0"
    ),
    source="google-deepmind/optax#1786; Lightning-AI/torchmetrics#1029; p-e-w/heretic#348", fidelity="adapted",
    precision="bf16", phase="forward", cause="zero_times_inf", op=["mul"],
    module="", line="ce = -(teacher * logp).sum(-1)",
    fix=(
        "torch.xlogy-style guard: select the terms with teacher > 0, or fill the masked logits with a large "
        "finite value."
    ),
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(8, 24), nn.GELU()), nn.Linear(24, 10)

    def forward(self, x, allowed):
        return self.out(self.body(x)).float().masked_fill(~allowed, float("-inf"))


def loss_fn(model, batch):
    x, allowed, teacher = batch
    logp = F.log_softmax(model(x, allowed), -1)
    ce = -(teacher * logp).sum(-1)
    return ce.mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        allowed = torch.ones(8, 10, dtype=torch.bool)
        if i == 3:
            allowed[2:4, 6:] = False     # first samples of a smaller task
        raw = torch.randn(8, 10, generator=g).masked_fill(~allowed, float("-inf"))
        batches.append((torch.randn(8, 8, generator=g), allowed, torch.softmax(raw, -1)))
    m = Student()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
