import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="class_weight_absent",
    title=(
        "Inverse-frequency class weights of a sample without class 3: the weight buffer holds inf, class 3 "
        "arrives later"
    ),
    source="perslev/MultiPlanarUNet#24; longcw/faster_rcnn_pytorch#53", fidelity="adapted",
    precision="fp32", phase="buffer", cause="buffer_corrupted", cause_alt=["div_by_zero"],
    op=["div", "reciprocal", "nll_loss2d", "nll_loss2d_forward", "nll_loss", "nll_loss_nd", "cross_entropy_loss"],
    module="seg", module_alt=[""], line='self.register_buffer("class_weight", counts.sum() / counts)',
    fix="Clamp the counts at 1 (or give absent classes the weight of the rarest one).",
    recoverable_by=["fix_code", "fix_data"], step=0, loss_step=3, symptom="buffer",
)


class Seg(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.classify = nn.Conv2d(8, 4, 1)
        self.register_buffer("class_weight", counts.sum() / counts)

    def forward(self, x):
        return self.classify(self.body(x))


class Task(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.seg = Seg(counts)


def loss_fn(model, batch):
    scan, mask = batch
    return F.cross_entropy(model.seg(scan), mask, weight=model.seg.class_weight)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(2, 1, 6, 6, generator=g), torch.randint(0, 3, (2, 6, 6), generator=g)) for _ in range(5)]
    counts = torch.bincount(torch.cat([m.flatten() for _, m in batches[:2]]), minlength=4).float()
    batches[3][1][0, 2:4, 2:4] = 3  # a small lesion
    model = Task(counts)
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
