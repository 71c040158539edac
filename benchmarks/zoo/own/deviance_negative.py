import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="deviance_negative",
    title="Poisson deviance on net sales: a week with more returns than sales is negative and y log(y / mu) is NaN",
    source="Nixtla/neuralforecast#408; h2oai/h2o-3#6430", fidelity="direct",
    precision="fp32", phase="forward", phase_alt=["data"], cause="label_out_of_domain", cause_alt=["log_of_negative"],
    op=["log"], module="head.dev", line="term = y * torch.log((y + 1e-9) / mu)",
    fix="Poisson targets must be counts: clip or drop negative weeks (or use a real-valued likelihood).",
    recoverable_by=["skip", "fix_data"], step=3, symptom="loss",
)


class Deviance(nn.Module):
    def forward(self, mu, y):
        term = y * torch.log((y + 1e-9) / mu)
        return 2 * (term - (y - mu)).mean()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate, self.dev = nn.Linear(12, 1), Deviance()

    def forward(self, h, y):
        return self.dev(F.softplus(self.rate(h)).squeeze(-1) + 1e-4, y)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 12, batch_first=True), Head()

    def forward(self, x, y):
        return self.head(self.rnn(x)[0][:, -1], y)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        y = torch.poisson(torch.full((10,), 4.0), generator=g)
        if i == 3:
            y[6] = -2.0
        batches.append((torch.randn(10, 7, 2, generator=g), y))
    m = Forecaster()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
