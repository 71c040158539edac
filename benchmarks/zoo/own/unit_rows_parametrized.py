import torch, torch.nn as nn
from torch.nn.utils import parametrize

CASE = dict(
    id="unit_rows_parametrized", title="A parametrization keeps the rows of a classifier on the unit sphere; the row of a class without examples was reset to zeros",
    source="own (torch.nn.utils.parametrize users)", fidelity="analogue",
    precision="fp32", phase="forward", cause="division_by_near_zero_norm", cause_alt=["zero_over_zero"], op=["div"],
    module="head.parametrizations.weight.0", module_alt=["head"], line="return w / w.norm(dim=1, keepdim=True)", fix="F.normalize, which has an eps.",
    recoverable_by=["fix_code"], step=0, symptom="loss",
)


class UnitRows(nn.Module):
    def forward(self, w):
        return w / w.norm(dim=1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 5, bias=False)
        with torch.no_grad():
            self.head.weight[3] = 0.0
        parametrize.register_parametrization(self.head, "weight", UnitRows())

    def forward(self, x):
        return 8.0 * self.head(nn.functional.normalize(self.body(x), dim=-1))


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(6, 4, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(3)]
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
