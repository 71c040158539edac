import torch, torch.nn as nn

CASE = dict(
    id="koopman_eig_identity", title="Koopman autoencoder advances in the eigenbasis of a matrix that starts as the identity: all eigenvalues are equal and the backward of eig divides by their differences",
    source="own (derivative of an eigenbasis)", fidelity="analogue",
    precision="fp32", phase="backward", cause="div_by_zero", cause_alt=["zero_over_zero"], op=["linalg_eig", "eig"],
    module="dyn", line="torch.linalg.eig(self.k)", fix="Start from distinct eigenvalues.",
    recoverable_by=["fix_code"], step=0, symptom="grad",
)


class Dyn(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.k = nn.Parameter(torch.eye(d))

    def forward(self, z):
        val, vec = torch.linalg.eig(self.k)
        c = torch.linalg.solve(vec, z.to(vec.dtype).T)
        return (vec @ (val[:, None] * c)).real.T


class Koopman(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dyn, self.dec = nn.Linear(3, 4), Dyn(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.dec(self.dyn(self.enc(x)))


def loss_fn(model, batch):
    x, nxt = batch
    return (model(x) - nxt).square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Koopman()
    batches = [(torch.randn(8, 3, generator=g), torch.randn(8, 3, generator=g)) for _ in range(3)]
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
