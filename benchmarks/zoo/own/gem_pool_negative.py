import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="gem_pool_negative",
    title="Generalised-mean pooling with a learned exponent: p leaves 3.0 and the first negative activation is NaN",
    source="own (GeM pooling without the clamp of the reference implementation)",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="pow_negative_base",
    op=["pow"],
    module="backbone.tail.0",
    line="return (x ** self.p).mean(dim=(-2, -1)) ** (1.0 / self.p)",
    fix="x.clamp(min=1e-6) before the power.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class GeM(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return (x ** self.p).mean(dim=(-2, -1)) ** (1.0 / self.p)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.tail = nn.Sequential(GeM(), nn.Linear(6, 4))

    def forward(self, x):
        return self.tail(F.leaky_relu(self.conv(x), 0.1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()


def loss_fn(model, batch):
    image, label = batch
    return F.cross_entropy(model.backbone(image), label)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(3, 2, 7, 7, generator=g) + 0.2, torch.randint(0, 4, (3,), generator=g)) for _ in range(5)]
    batches[3][0][1] -= 1.4  # standardised image: values below zero
    m = Net()
    with torch.no_grad():
        m.backbone.conv.weight.abs_()
        m.backbone.conv.bias.abs_()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
