import torch, torch.nn as nn

CASE = dict(
    id="cox_risk_exp", title="Cox partial likelihood sums exp(log hazard) without subtracting the maximum: a patient with an unscaled lab value overflows",
    source="havakv/pycox#147, #144", fidelity="direct",
    precision="fp32", phase="forward", cause="exp_overflow", op=["exp"],
    module="loss", line="at_risk = h.exp().cumsum(0)",
    fix="torch.logcumsumexp (or subtract the maximum before exp).",
    recoverable_by=["skip", "fix_code", "fix_data"], step=4, symptom="loss",
)


class CoxLoss(nn.Module):
    def forward(self, h, event):
        at_risk = h.exp().cumsum(0)
        ll = (h - at_risk.log()) * event
        return -ll.sum() / event.sum().clamp(min=1)


class DeepSurv(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
        self.loss = CoxLoss()

    def forward(self, x):
        return self.net(x).squeeze(-1)


def loss_fn(model, batch):
    x, time, event = batch
    order = time.argsort(descending=True)
    return model.loss(model(x)[order], event[order])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(12, 7, generator=g), torch.rand(12, generator=g), (torch.rand(12, generator=g) > 0.4).float()) for _ in range(6)]
    m = DeepSurv()
    with torch.no_grad():
        m.net[2].weight.abs_()
    batches[4][0][5, 3] = 5200.0  # platelets per microlitre, not in thousands
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
