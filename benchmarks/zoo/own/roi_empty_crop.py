import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="roi_empty_crop",
    title=(
        "RoI mean pooling slices the feature map by rounded corners; a small proposal rounds to zero width, "
        "mean of nothing"
    ),
    source="uber-research/UPSNet#57; SirLPS/roi_pooling#1; yhenon/keras-frcnn#232", fidelity="adapted",
    precision="fp32", phase="forward", cause="zero_over_zero", op=["mean"],
    module="roi_head.pool", line="crops.append(fmap[y0:y1, x0:x1].mean((0, 1)))",
    fix="Enforce at least one cell per RoI (x1 = max(x1, x0 + 1)) or filter small proposals.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=4, symptom="loss",
)


class RoIMean(nn.Module):
    def __init__(self, stride):
        super().__init__()
        self.stride = stride

    def forward(self, fmap, boxes):
        crops = []
        for box in boxes:
            x0, y0, x1, y1 = (box / self.stride).round().int().tolist()
            crops.append(fmap[y0:y1, x0:x1].mean((0, 1)))
        return torch.stack(crops)


class RoIHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.cls = RoIMean(8), nn.Linear(8, 4)

    def forward(self, fmap, boxes):
        return self.cls(self.pool(fmap, boxes))


class RCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.roi_head = nn.Conv2d(3, 8, 3, stride=1, padding=1), RoIHead()

    def forward(self, img, boxes):
        fmap = F.relu(self.backbone(img))[0].permute(1, 2, 0)
        return self.roi_head(fmap, boxes)


def loss_fn(model, batch):
    img, boxes, y = batch
    return F.cross_entropy(model(img, boxes), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        lo = torch.rand(6, 2, generator=g) * 50
        wh = torch.rand(6, 2, generator=g) * 40 + 16
        boxes = torch.cat([lo, lo + wh], 1).clamp(max=120)
        if i == 4:
            boxes[3] = torch.tensor([33.0, 20.0, 35.0, 60.0])
        batches.append((torch.randn(1, 3, 16, 16, generator=g), boxes, torch.randint(0, 4, (6,), generator=g)))
    m = RCNN()
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
