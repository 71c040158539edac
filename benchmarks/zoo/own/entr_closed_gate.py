import torch, torch.nn as nn

CASE = dict(
    id="entr_closed_gate", title="Gate entropy by torch.special.entr: finite for a gate of exactly 0, but its derivative -log(p) - 1 is infinite there",
    source="own (entropy regularisers on hard gates)", fidelity="analogue",
    precision="fp32", phase="backward", cause="log_of_zero", cause_alt=["sqrt_grad_at_zero"], op=["special_entr", "entr"],
    module="", line="torch.special.entr(p)", fix="Clamp p away from 0.",
    recoverable_by=["fix_code", "skip"], step=1, symptom="grad",
)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        p = torch.softmax(self.gate(x), -1)
        return self.out(p * x), p


def loss_fn(model, batch):
    x, y = batch
    pred, p = model(x)
    return (pred.squeeze(-1) - y).square().mean() - 0.01 * torch.special.entr(p).sum(-1).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(3):
        x = torch.randn(7, 4, generator=g)
        if step == 1:
            x[6] *= 1e4
        batches.append((x, torch.randn(7, generator=g)))
    m = Gated()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
