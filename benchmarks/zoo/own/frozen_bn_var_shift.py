import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="frozen_bn_var_shift",
    title=(
        "The checkpoint converter subtracts the old eps from running_var; a dead channel ends below -eps, "
        "rsqrt is NaN"
    ),
    source="facebookresearch/detectron2#3160; shicai/MobileNet-Caffe#87", fidelity="direct",
    precision="fp32", phase="buffer", phase_alt=["forward"], cause="buffer_corrupted", cause_alt=["sqrt_of_negative"],
    op=["rsqrt"], module="backbone.res3.bn", line='state["running_var"] = state["running_var"] - 1e-3',
    fix="Do not shift the variance when the eps of the two implementations agrees (or clamp it at 0).",
    recoverable_by=["fix_code", "fix_data"], step=3, symptom="loss",
)


class FrozenBN(nn.Module):
    def __init__(self, c, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("running_mean", torch.zeros(c))
        self.register_buffer("running_var", torch.ones(c))

    def forward(self, x):
        scale = (self.running_var + self.eps).rsqrt()
        return (x - self.running_mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1)


class Stage(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, padding=1, bias=False)
        self.bn = FrozenBN(o)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict({"res2": Stage(3, 6), "res3": Stage(6, 6)})
        self.head = nn.Linear(6, 4)

    def forward(self, x, deep):
        x = self.backbone["res2"](x)
        if deep:
            x = self.backbone["res3"](x)
        return self.head(x.mean((2, 3)))


def load_legacy(bn, state):
    state["running_var"] = state["running_var"] - 1e-3
    bn.load_state_dict(state)


def loss_fn(model, batch):
    image, box, epoch = batch
    return F.smooth_l1_loss(model(image, deep=epoch > 0), box)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(2, 3, 6, 6, generator=g), torch.rand(2, 4, generator=g), int(i >= 3)) for i in range(5)]
    model = Detector()
    for name, dead in (("res2", None), ("res3", 4)):
        var = torch.rand(6, generator=g) + 0.5
        if dead is not None:
            var[dead] = 2e-6
        load_legacy(model.backbone[name].bn, {"running_mean": torch.zeros(6), "running_var": var})
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), batches, loss_fn
