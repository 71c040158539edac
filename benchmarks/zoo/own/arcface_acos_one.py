import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="arcface_acos_one",
    title="ArcFace clamps the cosine to [-1, 1] and takes acos: at exactly 1 the derivative is -inf",
    source="sirius-ai/MobileFaceNet_TF#4 (arcface loss becomes NaN); cheind/pure-torch-ngp#4 (acos gradients)",
    fidelity="adapted",
    precision="fp32",
    phase="backward",
    cause="acos_asin_domain",
    cause_alt=["sqrt_grad_at_zero", "zero_times_inf"],
    op=["acos"],
    module="metric",
    line="theta = cosine.clamp(-1.0, 1.0).acos()",
    fix="Clamp to [-1 + 1e-6, 1 - 1e-6].",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="grad",
)


class ArcMargin(nn.Module):
    def __init__(self, d, classes, margin=0.3, scale=8.0):
        super().__init__()
        self.centers = nn.Parameter(torch.eye(classes, d))
        self.margin = margin
        self.scale = scale

    def forward(self, x, y):
        cosine = F.normalize(x) @ F.normalize(self.centers).t()
        theta = cosine.clamp(-1.0, 1.0).acos()
        onehot = F.one_hot(y, cosine.size(1)).to(cosine.dtype)
        return self.scale * torch.cos(theta + self.margin * onehot)


class Face(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4, bias=False)
        self.metric = ArcMargin(4, 3)
        nn.init.eye_(self.net.weight)

    def forward(self, x, y):
        return self.metric(self.net(x), y)


def loss_fn(model, batch):
    x, y = batch["image"], batch["identity"]
    return F.cross_entropy(model(x, y), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(5):
        batches.append({"image": torch.randn(6, 4, generator=g), "identity": torch.randint(0, 3, (6,), generator=g)})
    batches[3]["image"][2] = torch.tensor([0.0, 2.0, 0.0, 0.0])  # lies on the centre of class 1
    m = Face()
    frozen = dict(params=m.parameters(), lr=0.0)  # warm-up epoch: the learning rate is still 0
    return m, torch.optim.SGD([frozen], momentum=0.9), batches, loss_fn
