import torch, torch.nn as nn

CASE = dict(
    id="nanmean_nobody_rated", title="Missing ratings are NaN and nanmean is taken over raters; one item was rated by nobody and its mean is NaN",
    source="own (annotations with missing raters)", fidelity="analogue",
    precision="fp32", phase="forward", cause="zero_over_zero", op=["nanmean", "div"],
    module="", line="target = ratings.nanmean(-1)", fix="Leave out items without ratings.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=2, symptom="loss",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def loss_fn(model, batch):
    x, ratings = batch
    target = ratings.nanmean(-1)
    return (model(x) - target).square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = []
    for step in range(4):
        r = torch.randint(1, 6, (8, 3), generator=g).float()
        r[0, 1] = r[5, 2] = float("nan")
        if step == 2:
            r[6] = float("nan")
        batches.append((torch.randn(8, 4, generator=g), r))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
