import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="healthy_double_where",
    title=(
        "sinc filter and log magnitude with safe inner values; sensor gaps are NaN in the input and filled "
        "by nan_to_num"
    ),
    source="pytorch/pytorch#52248 (the double-where remedy)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class SincFilter(nn.Module):
    def __init__(self, taps=7):
        super().__init__()
        self.cut = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("t", torch.arange(taps).float() - taps // 2)

    def forward(self, x):
        arg = self.cut * self.t * torch.pi
        safe = torch.where(arg == 0, torch.ones_like(arg), arg)
        kernel = torch.where(arg == 0, torch.ones_like(arg), torch.sin(safe) / safe)
        return F.conv1d(x, kernel.view(1, 1, -1), padding=self.t.numel() // 2)


def safe_log(x):
    floor = torch.where(x > 0, x, torch.ones_like(x))
    return torch.where(x > 0, floor.log(), torch.zeros_like(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.filt = SincFilter()
        self.out = nn.Linear(20, 2)

    def forward(self, x):
        seen = ~torch.isnan(x)
        h = self.filt(torch.nan_to_num(x, nan=0.0))
        return self.out((safe_log(h.square()) * seen).squeeze(1))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(8):
        x = torch.randn(5, 1, 20, generator=g)
        x[torch.rand(5, 1, 20, generator=g) < 0.1] = float("nan")
        x[2] = 0.0
        batches.append({"x": x, "y": torch.randint(0, 2, (5,), generator=g)})
    model = Net()
    return model, torch.optim.Adam(model.parameters(), 1e-2), batches, loss_fn
