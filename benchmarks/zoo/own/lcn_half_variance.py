import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="lcn_half_variance",
    title="Local context norm takes E[x^2] - E[x]^2 of half-precision features: the squares leave the fp16 range",
    source="anthonymlortiz/lcn#4 (negative / NaN variance, caused by float16 overflow); megvii-research/TLC#3",
    fidelity="direct",
    precision="fp16",
    phase="forward",
    cause="overflow_fp16",
    cause_alt=["inf_minus_inf"],
    op=["mul", "square", "pow", "sub"],
    module="stages.mid.norm",
    line="spread = self.box(x * x) - self.box(x) * self.box(x)",
    fix="Compute the local moments in fp32 (x.float()) and clamp the variance at 0.",
    recoverable_by=["skip", "fp32", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class LocalContextNorm(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window

    def box(self, x):
        return F.avg_pool2d(x, self.window, stride=1, padding=self.window // 2, count_include_pad=False)

    def forward(self, x):
        spread = self.box(x * x) - self.box(x) * self.box(x)
        return (x - self.box(x)) / torch.sqrt(spread.clamp(min=0) + 1e-2)


class Stage(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, padding=1)
        self.norm = LocalContextNorm(3)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleDict({"low": Stage(1, 4), "mid": Stage(5, 6)})
        self.head = nn.Linear(6, 3)

    def forward(self, img):
        low = self.stages["low"](img / 50.0)
        mid = self.stages["mid"](torch.cat([low, img], 1))
        return self.head(mid.mean((2, 3)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        img = torch.rand(4, 1, 8, 8, generator=g) * 20
        if i == 3:
            img[2] = 2600.0 + 10 * torch.rand(1, 8, 8, generator=g)  # over-exposed 12 bit scene, not rescaled
        batches.append({"image": img, "label": torch.randint(0, 3, (4,), generator=g)})
    m = Net()
    with torch.no_grad():
        m.stages["mid"].conv.weight[:, 4] = 0.05
    return m, torch.optim.SGD(m.parameters(), 1e-3), batches, loss_fn
