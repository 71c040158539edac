import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="rcnn_target_log",
    title="Box encoder takes log(gt_height / anchor_height); an annotation with height 0 encodes to -inf",
    source="msracver/Deformable-ConvNets#168; rbgirshick/py-faster-rcnn#403", fidelity="direct",
    precision="fp32", phase="forward", phase_alt=["data"], cause="log_of_zero", cause_alt=["label_out_of_domain"],
    op=["log"],
    module="", line="th = torch.log(gh / ah)",
    fix="Drop annotations without extent when the dataset is read (or clamp the sizes to one pixel).",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


def size(b):
    return b[:, 2] - b[:, 0], b[:, 3] - b[:, 1]


def encode(anchor, gt):
    aw, ah = size(anchor)
    gw, gh = size(gt)
    tx = (gt[:, 0] + gw / 2 - anchor[:, 0] - aw / 2) / aw
    ty = (gt[:, 1] + gh / 2 - anchor[:, 1] - ah / 2) / ah
    tw = torch.log(gw / aw)
    th = torch.log(gh / ah)
    return torch.stack([tx, ty, tw, th], 1)


class RPN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bbox_pred = nn.Linear(12, 24), nn.Linear(24, 4)

    def forward(self, f):
        return self.bbox_pred(F.relu(self.conv(f)))


def loss_fn(model, batch):
    f, anchor, gt = batch
    return F.smooth_l1_loss(model(f), encode(anchor, gt), beta=1.0 / 9)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        lo, wh = torch.rand(12, 2, generator=g) * 50, torch.rand(12, 2, generator=g) * 20 + 4
        gt = torch.cat([lo, lo + wh], 1)
        anchor = torch.cat([lo + 1, lo + 17], 1)
        if i == 3:
            gt[9, 3] = gt[9, 1]          # the annotator clicked twice on the same line
        batches.append((torch.randn(12, 12, generator=g), anchor, gt))
    m = RPN()
    return m, torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9), batches, loss_fn
