import torch, torch.nn as nn

CASE = dict(
    id="mf_divergence",
    title=(
        "Matrix factorisation on raw 0-100 ratings with SGD lr 0.3: user and item factors push each other "
        "up and diverge"
    ),
    source="albertauyeung/matrix-factorization-in-python#5; caserec/CaseRecommender#38; ibayer/fastFM#70",
    fidelity="direct",
    precision="fp32", phase="forward", phase_alt=["backward"], cause="gradient_explosion",
    cause_alt=["overflow_any_precision"], op=["mul", "sum", "sub", "pow", "mean", "mse_loss", "add", "bmm"],
    module="factors", module_alt=["factors.user", "factors.item"], line="return (self.user(u) * self.item(i)).sum(-1)",
    fix="Lower the learning rate, scale the ratings and regularise or clip.",
    recoverable_by=["clip", "lower_lr", "fix_code"], step=9, symptom="loss", seeds=[0],
    crude_disagrees="explosion is a process over steps; which op overflows first is an accident",
)


class Factors(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.user, self.item = nn.Embedding(n, d), nn.Embedding(n, d)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1)


class MF(nn.Module):
    def __init__(self):
        super().__init__()
        self.factors, self.mean = Factors(12, 8), nn.Parameter(torch.tensor(50.0))

    def forward(self, u, i):
        return self.factors(u, i) + self.mean


def loss_fn(model, batch):
    u, i, r = batch
    err = (model(u, i) - r).pow(2)
    return err.mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(25):
        u, i = torch.randint(0, 12, (32,), generator=g), torch.randint(0, 12, (32,), generator=g)
        batches.append((u, i, torch.rand(32, generator=g) * 100))
    m = MF()
    return m, torch.optim.SGD(m.parameters(), lr=0.3), batches, loss_fn
