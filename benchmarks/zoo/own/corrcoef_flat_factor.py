import torch, torch.nn as nn

CASE = dict(
    id="corrcoef_flat_factor", title="Factor model is rewarded for the correlation of prediction and return: a suspended market has constant returns and corrcoef divides by 0",
    source="own (information-coefficient losses)", fidelity="analogue",
    precision="fp32", phase="forward", cause="zero_over_zero", cause_alt=["division_by_near_zero_norm"], op=["div", "corrcoef"],
    module="", line="torch.corrcoef(torch.stack([p, r]))", fix="Skip days without variation, or add an eps.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=3, symptom="loss",
)


class Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def loss_fn(model, batch):
    x, r = batch
    p = model(x)
    return 1 - torch.corrcoef(torch.stack([p, r]))[0, 1]


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(16, 5, generator=g), torch.randn(16, generator=g)) for _ in range(5)]
    batches[3][1].fill_(0.5)
    m = Factor()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
