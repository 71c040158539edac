import torch
import torch.nn as nn

CASE = dict(
    id="healthy_amin_inf_fill",
    title="Hard-negative mining fills forbidden pairs with +inf before amin, the best score starts at -inf",
    source="own; compare jinnnju/PaAno#1 (infinities in hard-negative mining)",
    fidelity="control",
    precision="fp32",
    phase="none",
    cause="none",
    op=[],
    module="",
    line="",
    fix="nothing to fix",
    recoverable_by=[],
    step=None,
)


class Mine(nn.Module):
    def forward(self, d, same):
        easiest = d.masked_fill(same, float("inf")).amin(1)
        farthest = d.masked_fill(~same, float("-inf")).amax(1)
        usable = torch.isfinite(easiest) & torch.isfinite(farthest)
        return farthest[usable], easiest[usable]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 4))
        self.mine = Mine()
        self.best = float("-inf")

    def forward(self, x, y):
        z = self.embed(x)
        d = torch.cdist(z, z)
        pos, neg = self.mine(d, y[:, None] == y[None])
        return (pos - neg + 0.5).relu().sum() / max(len(pos), 1) + 1e-3 * z.pow(2).mean()


def loss_fn(model, batch):
    loss = model(*batch)
    score = torch.maximum(torch.tensor(model.best), -loss.detach())
    model.best = score.item()
    return loss


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 5, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(8)]
    batches[4][1].zero_()  # one class only: every negative is +inf, the row is not used
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
