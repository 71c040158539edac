import torch, torch.nn as nn

CASE = dict(
    id="evidence_lgamma_pole", title="Evidential classifier forgets the + 1: relu evidence of 0 is a Dirichlet parameter of 0 and lgamma has a pole there",
    source="own (evidential deep learning users)", fidelity="analogue",
    precision="fp32", phase="forward", cause="log_of_zero", op=["lgamma"],
    module="", line="torch.lgamma(alpha).sum(-1)", fix="alpha = evidence + 1.",
    recoverable_by=["fix_code"], step=0, symptom="loss",
)


class Evidence(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU())

    def forward(self, x):
        return {"alpha": self.net(x)}


def kl(alpha):
    s = alpha.sum(-1)
    log_b = torch.lgamma(s) - torch.lgamma(alpha).sum(-1)
    return log_b.mean()


def loss_fn(model, batch):
    x, y = batch
    alpha = model(x)["alpha"]
    p = (alpha + 1e-6) / (alpha + 1e-6).sum(-1, keepdim=True)
    return nn.functional.nll_loss(p.log(), y) + 0.1 * kl(alpha)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Evidence()
    batches = [(torch.randn(8, 6, generator=g), torch.randint(0, 4, (8,), generator=g)) for _ in range(3)]
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
