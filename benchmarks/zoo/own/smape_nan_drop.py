import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="smape_nan_drop", title="SMAPE computes 0 / 0 where forecast and target are 0 and drops those elements by a NaN mask: the loss is finite, the gradient is not",
    source="pytorch/pytorch#22820, #16317", fidelity="direct",
    precision="fp32", phase="backward", phase_alt=["forward"], cause="zero_over_zero", cause_alt=["zero_times_inf"], op=["div"],
    module="smape", line="ratio = torch.div(num, den)",
    fix="Select the elements with a positive denominator before the division.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class SMAPE(nn.Module):
    def forward(self, p, y):
        num = (p - y).abs()
        den = p.abs() + y.abs()
        ratio = torch.div(num, den)
        keep = ~torch.isnan(ratio)
        return ratio[keep].mean()


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out, self.smape = nn.GRU(1, 12, batch_first=True), nn.Linear(12, 1), SMAPE()

    def forward(self, x, opened):
        h, _ = self.rnn(x.unsqueeze(-1))
        return F.softplus(self.out(h)).squeeze(-1) * opened


def loss_fn(model, batch):
    x, opened, y = batch
    return model.smape(model(x, opened), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(5, 10, generator=g), torch.ones(5, 10), torch.rand(5, 10, generator=g) + 0.2) for _ in range(5)]
    batches[3][1][2, 4:6] = 0.0  # the shop is closed: forecast 0, sales 0
    batches[3][2][2, 4:6] = 0.0
    m = Forecaster()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
