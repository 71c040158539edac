import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="mish_fn_backward",
    title="Memory-efficient softplus Function: the hand-written backward computes e^x / (1 + e^x), inf / inf above 88",
    source="AlexeyAB/darknet#3994; hunglc007/tensorflow-yolov4-tflite#1", fidelity="adapted",
    precision="fp32", phase="backward", cause="custom_backward_bug", cause_alt=["exp_overflow"], op=["exp", "div"],
    module="stem.act", line="return g * torch.exp(x) / (1 + torch.exp(x))",
    fix="Use torch.sigmoid(x) in the backward.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class SoftplusFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.softplus(x)

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * torch.exp(x) / (1 + torch.exp(x))


class Softplus(nn.Module):
    def forward(self, x):
        return SoftplusFn.apply(x)


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(1, 6, 3, padding=1), Softplus()

    def forward(self, x):
        return self.act(self.conv(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = Stem(), nn.GroupNorm(2, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).amax((2, 3)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(5, 1, 6, 6, generator=g), torch.randint(0, 4, (5,), generator=g)) for _ in range(6)]
    batches[3][0][1] *= 255.0            # this image was not divided by 255
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 1e-3), batches, loss_fn
