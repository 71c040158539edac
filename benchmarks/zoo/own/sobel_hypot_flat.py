import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="sobel_hypot_flat", title="Edge loss takes torch.hypot of Sobel responses: on a flat black border both are 0 and the derivative is 0 / 0",
    source="own (gradient-magnitude losses)", fidelity="analogue",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", cause_alt=["zero_over_zero"], op=["hypot"],
    module="", line="torch.hypot(gx, gy)", fix="torch.sqrt(gx ** 2 + gy ** 2 + eps).",
    recoverable_by=["fix_code", "skip"], step=0, symptom="grad",
)


class Restorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, x):
        return x * torch.sigmoid(self.b(F.relu(self.a(x))))


def edges(x):
    k = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    gx, gy = (F.conv2d(x, w[None, None]) for w in (k, k.T))
    return torch.hypot(gx, gy)


def loss_fn(model, batch):
    x, y = batch
    return F.l1_loss(edges(model(x)), edges(y))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(3):
        x = torch.rand(3, 1, 8, 8, generator=g)
        x[:, :, :4] = 0.0
        batches.append((x, torch.rand(3, 1, 8, 8, generator=g)))
    m = Restorer()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
