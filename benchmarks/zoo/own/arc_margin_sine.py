import math, torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="arc_margin_sine",
    title=(
        "ArcFace computes the sine as sqrt(1 - cos^2); the cosine of an embedding with its own centre "
        "rounds to just above 1"
    ),
    source="ronghuaiyang/arcface-pytorch#32, #91; MccreeZhao/FR-Loss-on-Mnist#2", fidelity="direct",
    precision="fp32", phase="forward", cause="sqrt_of_negative", op=["sqrt"],
    module="margin", line="sine = torch.sqrt(1.0 - cosine.pow(2))",
    fix="(1 - cosine^2).clamp(min=1e-6) under the root.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss", seeds=[0],
)


class ArcMargin(nn.Module):
    def __init__(self, d, n, s=16.0, m=0.3):
        super().__init__()
        self.weight, self.s = nn.Parameter(torch.randn(n, d)), s
        self.cos_m, self.sin_m = math.cos(m), math.sin(m)

    def forward(self, x, y):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        sine = torch.sqrt(1.0 - cosine.pow(2))
        phi = cosine * self.cos_m - sine * self.sin_m
        hot = F.one_hot(y, cosine.size(1)).bool()
        return torch.where(hot, phi, cosine) * self.s


class FaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.margin = nn.Parameter(torch.ones(())), ArcMargin(12, 20)

    def forward(self, x, y):
        return self.margin(self.gain * x, y)


def loss_fn(model, batch):
    x, y, replay = batch
    if replay:                                # class centres are replayed as samples of their own class
        x, y = model.margin.weight.detach().clone() * 2.0, torch.arange(20)
    return F.cross_entropy(model(x, y), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed + 1)
    batches = []
    for i in range(6):
        batches.append((torch.randn(8, 12, generator=g), torch.randint(0, 20, (8,), generator=g), i == 3))
    m = FaceNet()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
