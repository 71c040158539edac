import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="multipath_logdet",
    title=(
        "Trajectory loss takes logdet of a predicted 2x2 covariance whose correlation is not bounded: the "
        "determinant is negative"
    ),
    source="stepankonev/waymo-motion-prediction-challenge-2022-multipath-plus-plus#9; ryanchankh/mcr2#1",
    fidelity="direct",
    precision="fp32", phase="forward", cause="log_of_negative",
    op=["logdet", "linalg_slogdet", "_linalg_slogdet", "log", "where", "scalar_tensor"],
    module="decoder.nll", line="half_logdet = 0.5 * torch.logdet(cov)",
    fix="Predict a Cholesky factor (or rho = tanh(.)), so that the covariance is positive definite.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class GaussNLL(nn.Module):
    def forward(self, mu, cov, y):
        d = (y - mu).unsqueeze(-1)
        maha = (d.transpose(-1, -2) @ torch.linalg.solve(cov, d)).squeeze()
        half_logdet = 0.5 * torch.logdet(cov)
        return (half_logdet + 0.5 * maha.clamp(max=50.0)).mean()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu, self.var, self.cross, self.nll = nn.Linear(16, 2), nn.Linear(16, 2), nn.Linear(16, 1), GaussNLL()

    def forward(self, h, y):
        v, c = F.softplus(self.var(h)) + 0.1, self.cross(h)
        cov = torch.stack([torch.cat([v[:, :1], c], 1), torch.cat([c, v[:, 1:]], 1)], 1)
        return self.nll(self.mu(h), cov, y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.decoder = nn.GRU(4, 16, batch_first=True), Decoder()

    def forward(self, hist, y):
        return self.decoder(self.enc(hist)[1][0], y)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(9, 6, 4, generator=g) * 0.1, torch.randn(9, 2, generator=g)) for _ in range(6)]
    m = Model()
    with torch.no_grad():
        m.decoder.cross.weight.mul_(0.2)
        m.decoder.cross.weight[0, 0] = 3.0
        m.decoder.cross.bias.zero_()
        m.enc.weight_ih_l0[32].abs_()
        m.enc.bias_ih_l0[32] = 0.0
        m.enc.bias_hh_l0[32] = 0.0
    batches[3][0][4] = 4.0               # a track in the wrong coordinate frame
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
