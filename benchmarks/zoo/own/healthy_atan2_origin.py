import torch, torch.nn as nn

CASE = dict(
    id="healthy_atan2_origin",
    title=(
        "Phase loss with atan2 at 0 + 0i: the reciprocal inside Atan2Backward is inf, autograd masks it and "
        "all is finite"
    ),
    source="pytorch/pytorch#98276 (fixed: the gradient at the origin is masked to 0)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class PhaseLoss(nn.Module):
    def forward(self, re, im, target):
        phase = torch.atan2(im, re)
        return (1 - torch.cos(phase - target)).mean()


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))
        self.criterion = PhaseLoss()

    def forward(self, re, im):
        mask = self.net(torch.cat([re, im], -1))
        mr, mi = mask.chunk(2, -1)
        return mr * re - mi * im, mr * im + mi * re


def loss_fn(model, batch):
    re, im, target = batch
    out = model(re, im)
    return model.criterion(*out, target)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        re, im = torch.randn(5, 6, generator=g), torch.randn(5, 6, generator=g)
        re[2, 4:], im[2, 4:] = 0.0, 0.0
        batches.append((re, im, torch.rand(5, 6, generator=g) * 6 - 3))
    m = Enhancer()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
