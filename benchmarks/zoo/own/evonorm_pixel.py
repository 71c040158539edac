import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="evonorm_pixel", title="EvoNorm takes the unbiased variance over height and width; a small crop reaches the last stage as a 1x1 map",
    source="digantamisra98/EvoNorm#4, #5", fidelity="direct",
    precision="bf16", phase="forward", cause="std_of_single_element", op=["var", "std", "var_mean"],
    module="stages.2.norm", line="v = x.var(dim=(2, 3), keepdim=True)",
    fix="unbiased=False (and a minimum crop size).",
    recoverable_by=["skip", "fix_code", "fix_data"], step=4, symptom="loss",
)


class EvoNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w, self.v1, self.b = nn.Parameter(torch.ones(1, c, 1, 1)), nn.Parameter(torch.ones(1, c, 1, 1)), nn.Parameter(torch.zeros(1, c, 1, 1))

    def forward(self, x):
        v = x.var(dim=(2, 3), keepdim=True)
        return x * torch.sigmoid(self.v1 * x) / torch.sqrt(v + 1e-5) * self.w + self.b


class Stage(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(i, o, 3, 2, 1), EvoNorm(o)

    def forward(self, x):
        return self.norm(self.conv(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages, self.fc = nn.ModuleList([Stage(3, 6), Stage(6, 8), Stage(8, 8)]), nn.Linear(8, 3)

    def forward(self, x):
        for s in self.stages:
            x = s(x)
        return self.fc(x.mean((2, 3)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(4, 3, s, s, generator=g), torch.randint(0, 3, (4,), generator=g)) for s in (24, 16, 24, 16, 8, 16)]
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
