import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="poisson_log_rate",
    title=(
        "Count model with PoissonNLLLoss(log_input=True): a cell with a huge library size drives the log "
        "rate beyond 88"
    ),
    source="catboost/catboost#1829; scikit-learn-contrib/skglm#252; RJT1990/pyflux#21", fidelity="direct",
    precision="fp32", phase="forward", cause="exp_overflow", op=["exp", "poisson_nll_loss"],
    module="nll", module_alt=[""], line="return model.nll(model(x), counts)",
    fix="Bound the log rate (clamp, or log1p-scaled inputs) before the exponential.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=4, symptom="loss", seeds=[0],
)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(15, 12), nn.ReLU())
        self.dec = nn.Linear(12, 15)
        self.nll = nn.PoissonNLLLoss(log_input=True)

    def forward(self, x):
        return self.dec(self.enc(x))


def loss_fn(model, batch):
    x, counts = batch
    return model.nll(model(x), counts)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        counts = torch.poisson(torch.full((10, 15), 2.0), generator=g)
        if i == 4:
            counts[7] = counts[7] * 400.0 + 300.0
        batches.append((counts * 0.5, counts))
    m = Decoder()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
