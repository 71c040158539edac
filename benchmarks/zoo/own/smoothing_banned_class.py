import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="smoothing_banned_class", title="Classes that a sample may not take are set to -inf before cross_entropy with label_smoothing: the smoothed part asks for the log-probability of every class",
    source="facebookresearch/pytext#1698; candle-org/MindAct#1633", fidelity="direct",
    precision="fp32", phase="forward", cause="log_of_zero", cause_alt=["zero_times_inf"], op=["log_softmax", "masked_fill", "cross_entropy", "sum", "mul"],
    module="", line="masked_fill(~allowed, float(\"-inf\"))", fix="Mask with a large negative finite number, or smooth over the allowed classes only.",
    recoverable_by=["fix_code", "skip"], step=2, symptom="loss",
)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU())
        self.out = nn.Linear(16, 5)

    def forward(self, x, allowed):
        return self.out(self.body(x)).masked_fill(~allowed, float("-inf"))


def loss_fn(model, batch):
    x, allowed, y = batch
    logits = model(x, allowed)
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(4):
        allowed = torch.ones(8, 5, dtype=torch.bool)
        if step == 2:
            allowed[3, 4] = False
        batches.append((torch.randn(8, 6, generator=g), allowed, torch.randint(0, 4, (8,), generator=g)))
    m = Tagger()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
