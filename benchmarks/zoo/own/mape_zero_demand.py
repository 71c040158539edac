import torch, torch.nn as nn

CASE = dict(
    id="mape_zero_demand", title="Forecaster trained on the mean absolute percentage error: a day without sales divides by 0",
    source="unit8co/darts#2517; dmlc/xgboost#7586; LibCity/Bigscity-LibCity#219", fidelity="direct",
    precision="bf16", phase="forward", cause="div_by_zero", op=["div"],
    module="criterion", line="return (err / y.abs()).mean()",
    fix="Mask zero targets (masked MAPE), or use sMAPE / MAE.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=4, symptom="loss",
)


class MAPE(nn.Module):
    def forward(self, p, y):
        err = (p - y).abs()
        return (err / y.abs()).mean()


class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(1, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=2, dilation=2)
        self.out, self.criterion = nn.Linear(8, 4), MAPE()

    def forward(self, x):
        h = torch.relu(self.c2(torch.relu(self.c1(x.unsqueeze(1)))))
        return self.out(h.mean(-1))


def loss_fn(model, batch):
    x, y = batch
    return model.criterion(model(x).float(), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(6, 20, generator=g) * 5, torch.rand(6, 4, generator=g) * 5 + 1) for _ in range(6)]
    batches[4][1][3, 2] = 0.0
    m = TCN()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
