import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="giou_area_half",
    title="GIoU loss on pixel boxes in half precision: width times height of a large object is more than 65504",
    source="pytorch/vision#3371, #3383; facebookresearch/fvcore#113", fidelity="direct",
    precision="fp16", phase="forward", cause="overflow_fp16", op=["mul"],
    module="head.giou", line="return (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])",
    fix="Cast the boxes to float32 before areas are formed, or work with normalised coordinates.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="loss",
)


def area(b):
    return (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])


class GIoU(nn.Module):
    def forward(self, p, t):
        lt, rb = torch.max(p[:, :2], t[:, :2]), torch.min(p[:, 2:], t[:, 2:])
        wh = (rb - lt).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        union = area(p) + area(t) - inter
        hull = torch.cat([torch.min(p[:, :2], t[:, :2]), torch.max(p[:, 2:], t[:, 2:])], 1)
        c = (hull[:, 2] - hull[:, 0]) * (hull[:, 3] - hull[:, 1]) + 1.0
        return (1 - inter / (union + 1.0) + (c - union) / c).mean()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.reg, self.giou = nn.Linear(16, 4), GIoU()

    def forward(self, h, ctr, stride, gt):
        d = F.softplus(self.reg(h)) * stride
        box = torch.cat([ctr - d[:, :2], ctr + d[:, 2:]], 1)
        return self.giou(box, gt)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(10, 16), Head()

    def forward(self, f, ctr, stride, gt):
        return self.head(F.relu(self.backbone(f)), ctr.half(), stride.half(), gt.half())


def loss_fn(model, batch):
    return model(*batch).float()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        ctr, half = torch.rand(8, 2, generator=g) * 200 + 100, torch.rand(8, 2, generator=g) * 20 + 6
        stride = torch.full((8, 1), 16.0)
        gt = torch.cat([ctr - half, ctr + half], 1)
        if i == 3:
            gt[5] = torch.tensor([10.0, 20.0, 330.0, 300.0])    # a bus that fills the image
        batches.append((torch.randn(8, 10, generator=g), ctr, stride, gt))
    m = Detector()
    return m, torch.optim.SGD(m.parameters(), 1e-3), batches, loss_fn
