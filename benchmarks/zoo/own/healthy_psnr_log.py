import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="healthy_psnr_log", title="PSNR of a perfectly reconstructed patch is 10 log10(1 / 0) = inf; it is only kept in a running history without gradient",
    source="francois-rozet/piqa (PSNR of identical images)", fidelity="control",
    precision="bf16", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[], step=None,
)


class Meter:
    def __init__(self):
        self.history = []

    @torch.no_grad()
    def __call__(self, x, y):
        mse = (x - y).pow(2).mean((1, 2, 3))
        self.history.append((10 * torch.log10(1.0 / mse)).mean())


class SR(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.psnr = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1), Meter()

    def forward(self, x):
        return x + x * self.b(F.relu(self.a(x)))


def loss_fn(model, batch):
    x, y = batch
    out = model(x).float()
    model.psnr(out, y)
    return F.l1_loss(out, y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(8):
        y = torch.rand(3, 1, 8, 8, generator=g)
        if i >= 2:
            y[1] = 0.0  # a black patch is always reconstructed exactly
        batches.append((y * 0.9, y))
    m = SR()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
