import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="rmsle_negative_sales",
    title="Squared log error on daily sales: a day with more returns than sales has target -3 and log1p(-3) is NaN",
    source="kdgutier/esrnn_torch#18; sktime/pytorch-forecasting#560; timeseriesAI/tsai#150", fidelity="adapted",
    precision="fp32", phase="forward", phase_alt=["data"], cause="label_out_of_domain", cause_alt=["log_of_negative"],
    op=["log1p"], module="criterion", line="return F.mse_loss(torch.log1p(pred), torch.log1p(sales))",
    fix="Clean the targets (sales net of returns can be negative) or use a loss that is defined there.",
    recoverable_by=["skip", "fix_data"], step=4, symptom="loss",
)


class SquaredLogError(nn.Module):
    def forward(self, pred, sales):
        return F.mse_loss(torch.log1p(pred), torch.log1p(sales))


class Demand(nn.Module):
    def __init__(self):
        super().__init__()
        self.store = nn.Embedding(6, 8)
        self.rnn = nn.GRU(9, 12, batch_first=True)
        self.out = nn.Linear(12, 1)
        self.criterion = SquaredLogError()

    def forward(self, store, hist):
        s = self.store(store)[:, None].expand(-1, hist.size(1), -1)
        h, _ = self.rnn(torch.cat([s, hist[..., None]], -1))
        return F.softplus(self.out(h[:, -1])).squeeze(-1)


def loss_fn(model, batch):
    return model.criterion(model(batch["store"], batch["hist"]), batch["sales"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        sales = torch.randint(0, 40, (10,), generator=g).float()
        if i == 4:
            sales[7] = -3.0
        hist = torch.rand(10, 8, generator=g)
        batches.append({"store": torch.randint(0, 6, (10,), generator=g), "hist": hist, "sales": sales})
    model = Demand()
    return model, torch.optim.Adam(model.parameters(), 5e-3), batches, loss_fn
