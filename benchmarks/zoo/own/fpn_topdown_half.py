import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="fpn_topdown_half", title="Feature pyramid without norm on the laterals: the top-down sums accumulate level by level and pass 65504 in fp16",
    source="nullmax-vision/HiP-AD#9; ZJULearning/resa#48", fidelity="direct",
    precision="fp16", phase="forward", cause="overflow_fp16", op=["add", "add_"],
    module="neck", line='lat[i] = lat[i] + F.interpolate(lat[i + 1], scale_factor=2.0, mode="nearest")',
    fix="Normalise the lateral outputs (no_norm_on_lateral=False) or run the neck in fp32.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="loss",
)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.s1, self.s2, self.s3 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)

    def forward(self, x):
        a = F.relu(self.s1(x))
        b = F.relu(self.s2(a))
        return [a, b, F.relu(self.s3(b))]


class FPN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
        self.smooth = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, feats):
        lat = [l(f) for l, f in zip(self.lateral, feats)]
        for i in (1, 0):
            lat[i] = lat[i] + F.interpolate(lat[i + 1], scale_factor=2.0, mode="nearest")
        return [s(x.float() * 1e-3) for s, x in zip(self.smooth, lat)]


class Det(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.neck, self.cls = Backbone(), FPN(), nn.Linear(8, 4)

    def forward(self, x):
        return sum(self.cls(p.mean((2, 3))) for p in self.neck(self.backbone(x)))


def loss_fn(model, batch):
    z = model(batch[0])
    return F.cross_entropy(z, batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(2, 3, 16, 16, generator=g), torch.randint(0, 4, (2,), generator=g)) for _ in range(5)]
    m = Det()
    with torch.no_grad():
        for l in m.neck.lateral:
            l.weight.fill_(8.0)
        for c in (m.backbone.s1, m.backbone.s2, m.backbone.s3):
            c.weight.fill_(1.0 / (9 * c.in_channels))
    batches[3][0][1] = SCALE
    return m, torch.optim.SGD(m.parameters(), 1e-6), batches, loss_fn


SCALE = 480.0  # a camera that delivers raw 10-bit values
