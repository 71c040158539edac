import torch, torch.nn as nn
from torch.distributions import Normal

CASE = dict(
    id="copula_rank_one", title="Gaussian copula maps ranks to normal scores with icdf(rank / n): the largest value has rank n and icdf(1) is inf",
    source="own (rank-based normal scores)", fidelity="analogue",
    precision="fp32", phase="forward", cause="acos_asin_domain", op=["erfinv"],
    module="", line="std.icdf(rank / x.shape[0])", fix="Divide by n + 1.",
    recoverable_by=["fix_code"], step=0, symptom="loss",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, z):
        return self.net(z)


def scores(x):
    std = Normal(0.0, 1.0)
    rank = x.argsort(0).argsort(0).float() + 1
    return std.icdf(rank / x.shape[0])


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(scores(x)).squeeze(-1), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(9, 4, generator=g), torch.randn(9, generator=g)) for _ in range(2)]
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
