import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="whitening_eigh",
    title="Decorrelated batch norm through eigh: equal eigenvalues make the gradient 1 / (l_i - l_j) infinite",
    source="pytorch/pytorch#49886, #50942; jax-ml/jax#2311",
    fidelity="adapted",
    precision="fp32",
    phase="backward",
    cause="div_by_zero",
    cause_alt=["zero_over_zero"],
    op=["linalg_eigh", "_linalg_eigh", "eigh", "div", "linalg_eig"],
    module="whiten",
    line="values, basis = torch.linalg.eigh(cov)",
    fix="Use ZCA through a Newton iteration, or mask the pairs of equal eigenvalues.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="grad",
)


class Whiten(nn.Module):
    def forward(self, x):
        centred = x - x.mean(0)
        cov = centred.t() @ centred / x.size(0) + 1e-2 * torch.eye(x.size(1))
        values, basis = torch.linalg.eigh(cov)
        return centred @ basis * values.rsqrt()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(3))
        self.whiten = Whiten()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.whiten(x * self.gate.mean())))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        x = torch.randn(8, 3, generator=g) * torch.tensor([1.0, 2.0, 3.0])
        if i == 3:
            corner = torch.tensor([[-1.0, 1.0]])
            x = torch.cartesian_prod(corner[0], corner[0], corner[0])  # a full factorial design: isotropic
        batches.append({"x": x, "y": torch.randint(0, 2, (8,), generator=g)})
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
