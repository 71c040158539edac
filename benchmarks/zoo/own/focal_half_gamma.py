import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="focal_half_gamma",
    title="Focal loss with gamma 0.5: an easy example has p = 1 exactly, (1 - p)^0.5 is 0 and its derivative infinite",
    source="kaidic/LDAM-DRW#17; liuyuisanai/Focal-Loss#11", fidelity="direct",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", cause_alt=["zero_times_inf"], op=["pow"],
    module="crit", line="mod = (1 - p).pow(self.gamma)",
    fix="(1 - p).clamp(min=1e-6) before the power.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class Focal(nn.Module):
    def __init__(self, gamma=0.5):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, y):
        ce = F.cross_entropy(logits, y, reduction="none")
        p = torch.exp(-ce)
        mod = (1 - p).pow(self.gamma)
        return (mod * ce).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4))
        self.crit = Focal()

    def forward(self, x, y):
        return self.crit(self.body(x), y)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 6, generator=g), torch.randint(0, 4, (10,), generator=g)) for _ in range(6)]
    m = Net()
    batches[3][0][7] *= 300.0
    with torch.no_grad():
        batches[3][1][7] = m.body(batches[3][0][7]).argmax()
    return m, torch.optim.SGD(m.parameters(), 1e-3), batches, loss_fn
