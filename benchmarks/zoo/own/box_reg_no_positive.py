import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="box_reg_no_positive",
    title="One-stage detector: smooth L1 over the positive anchors of an image without objects is the mean of nothing",
    source="zhang-tao-whu/e2ec#7; amdegroot/ssd.pytorch#247; open-mmlab/mmdetection#5976",
    fidelity="direct",
    precision="fp32",
    phase="forward",
    cause="zero_over_zero",
    op=["smooth_l1_loss", "mean"],
    module="bbox_head.reg_loss",
    line="return F.smooth_l1_loss(pred[pos], target[pos])",
    fix="Return pred.sum() * 0 when there is no positive anchor.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class ClsLoss(nn.Module):
    def forward(self, logit, pos):
        return F.binary_cross_entropy_with_logits(logit, pos.float())


class RegLoss(nn.Module):
    def forward(self, pred, target, pos):
        return F.smooth_l1_loss(pred[pos], target[pos])


class BBoxHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls = nn.Conv1d(8, 1, 1)
        self.reg = nn.Conv1d(8, 4, 1)
        self.cls_loss = ClsLoss()
        self.reg_loss = RegLoss()
        self.log = {}

    def losses(self, f, target, pos):
        logit = self.cls(f).squeeze(1)
        with torch.no_grad():
            hit = (logit > 0) & pos
            self.log["precision"] = hit.sum() / (logit > 0).sum()  # 0 / 0 when nothing is predicted: only logged
        box = self.reg(f).transpose(1, 2)
        return {"cls": self.cls_loss(logit, pos), "reg": self.reg_loss(box, target, pos)}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.neck = nn.Conv1d(5, 8, 3, padding=1)
        self.bbox_head = BBoxHead()

    def forward(self, f, target, pos):
        return self.bbox_head.losses(F.relu(self.neck(f)), target, pos)


def loss_fn(model, batch):
    return sum(model(*batch).values())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        pos = torch.rand(2, 12, generator=g) > 0.7
        pos[0, 0] = True
        if i == 3:
            pos[:] = False
        batches.append((torch.randn(2, 5, 12, generator=g), torch.randn(2, 12, 4, generator=g), pos))
    m = Detector()
    with torch.no_grad():
        m.bbox_head.cls.bias.fill_(-6.0)
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
