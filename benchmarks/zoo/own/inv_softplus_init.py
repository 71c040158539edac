import torch, torch.nn as nn

CASE = dict(
    id="inv_softplus_init", title="A kernel length-scale is initialised through the inverse softplus log(expm1(x)): the prior mean of 120 overflows and the raw parameter starts at inf",
    source="bayesflow-org/bayesflow#270; sims1253/bayesfam#31", fidelity="adapted",
    precision="fp32", phase="parameter", cause="parameter_corrupted", cause_alt=["exp_overflow"], op=["expm1", "softplus", "log", "mul", "div"],
    module="gp.kernels.1", line="self.raw = nn.Parameter(torch.log(torch.expm1(torch.as_tensor(scale))))",
    fix="inverse softplus as x + log(-expm1(-x)).",
    recoverable_by=["fix_code"], step=0, loss_step=2, symptom="weight",
)


class RBF(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.raw = nn.Parameter(torch.log(torch.expm1(torch.as_tensor(scale))))

    def forward(self, a, b):
        ell = nn.functional.softplus(self.raw)
        return torch.exp(-0.5 * (a[:, None] - b[None]).pow(2).sum(-1) / ell) * ell.log1p()


class GP(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernels = nn.ModuleList([RBF(1.5), RBF(120.0)])
        self.noise = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x, y, long_range):
        k = self.kernels[0](x, x)
        if long_range:
            k = k + self.kernels[1](x, x)
        L = torch.linalg.cholesky_ex(k + (self.noise.exp() + 1e-3) * torch.eye(x.size(0)))[0]
        a = torch.cholesky_solve(y[:, None], L)
        return 0.5 * (y[:, None] * a).sum() + L.diagonal().log().sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.warp, self.gp = nn.Linear(2, 2), GP()


def loss_fn(model, batch):
    x, y, long_range = batch
    return model.gp(model.warp(x), y, long_range)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 2, generator=g), torch.randn(10, generator=g), i >= 2) for i in range(5)]
    m = Model()
    return m, torch.optim.Adam(m.parameters(), 1e-2), batches, loss_fn
