import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="sensor_gap_mask",
    title=(
        "Sensor gaps are NaN in the window; the loss multiplies the squared error by the validity mask: NaN "
        "* 0 is NaN"
    ),
    source="ecmwf/WeatherGenerator#2723; INRIA/geoarches#88; chemprop/chemprop#960", fidelity="direct",
    precision="fp32", phase="data", cause="input_nonfinite", op=["sub", "pow", "mul", "mse_loss"],
    module="", line='y[4, 7:10] = float("nan")',
    fix="Select valid elements (torch.where or indexing) instead of multiplying by the mask.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(3, 12, 3, padding=1), nn.Conv1d(12, 1, 3, padding=1)

    def forward(self, x):
        return self.c2(F.relu(self.c1(x))).squeeze(1)


def loss_fn(model, batch):
    x, y, valid = batch
    err = (model(x) - y).pow(2)
    return (err * valid).sum() / valid.sum().clamp(min=1)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        x, y = torch.randn(6, 3, 16, generator=g), torch.randn(6, 16, generator=g)
        if i == 3:
            y[4, 7:10] = float("nan")
        batches.append((x, y, torch.isfinite(y).float()))
    m = TCN()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
