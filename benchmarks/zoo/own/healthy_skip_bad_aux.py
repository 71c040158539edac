import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="healthy_skip_bad_aux", title="An auxiliary alignment loss is NaN for a batch without pairs; the trainer adds it only when it is finite",
    source="facebookresearch/fairchem#441 (non-finite terms are left out)", fidelity="control",
    precision="fp16", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[], step=None,
)


class Align(nn.Module):
    def forward(self, h, pairs):
        return (h[pairs[:, 0]] - h[pairs[:, 1]]).float().pow(2).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.cls, self.align = nn.Linear(6, 12), nn.Linear(12, 3), Align()

    def forward(self, x):
        return torch.tanh(self.enc(x))


def loss_fn(model, batch):
    x, y, pairs = batch
    h = model(x)
    loss = F.cross_entropy(model.cls(h), y)
    aux = model.align(h, pairs)
    if torch.isfinite(aux):
        loss = loss + 0.1 * aux
    return loss


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(8):
        n = 0 if i in (3, 5) else 4
        batches.append((torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g), torch.randint(0, 8, (n, 2), generator=g)))
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
