import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="static_scale_unscale",
    title="Static loss scale of 2^15 in an own fp16 optimizer: a hard batch pushes the scaled gradients beyond 65504",
    source="open-mmlab/mmdetection#3690; NVIDIA/apex#43; NVIDIA/DALI#1377", fidelity="direct",
    precision="fp16", phase="backward", cause="loss_scale_overflow", cause_alt=["overflow_fp16"],
    op=["to_copy", "_to_copy", "to", "mm", "addmm", "linear", "mul", "mse_loss", "div"],
    module="", line="return loss * SCALE",
    fix="Use a dynamic scale (GradScaler) that backs off, or a smaller static one.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="grad",
)
SCALE = 32768.0


class ScaledSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(SCALE)
        return super().step(closure)


class Head(nn.Module):
    def __init__(self, d, o):
        super().__init__()
        self.fc1 = nn.Linear(d, d)
        self.fc2 = nn.Linear(d, o)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.box_head = Head(16, 4)

    def forward(self, x):
        return self.box_head(F.relu(self.stem(x)))


def loss_fn(model, batch):
    feats, boxes = batch
    loss = F.mse_loss(model(feats).float(), boxes)
    return loss * SCALE


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 8, generator=g), torch.rand(8, 4, generator=g)) for _ in range(5)]
    batches[3][1][5] = torch.tensor([12.0, 40.0, 90.0, 130.0])  # a box in pixels instead of relative units
    model = Detector()
    return model, ScaledSGD(model.parameters(), lr=0.01, momentum=0.9), batches, loss_fn
