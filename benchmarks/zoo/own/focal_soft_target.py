import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="focal_soft_target",
    title=(
        "Focal loss with gamma 1.5 on soft labels: two annotators' votes sum to 1.3, 1 - p_t is negative "
        "and its power NaN"
    ),
    source="xlliu7/TadTR#20; kaidic/LDAM-DRW#17; mkocabas/focal-loss-keras#5", fidelity="adapted",
    precision="fp32", phase="forward", cause="pow_negative_base", cause_alt=["label_out_of_domain"], op=["pow"],
    module="heads.cls.focal", line="weight = (1 - pt) ** self.gamma",
    fix="Renormalise the soft labels (or clamp 1 - p_t at 0).",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


class SoftFocal(nn.Module):
    def __init__(self, gamma=1.5):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, soft):
        p = torch.softmax(logits, -1)
        pt = (p * soft).sum(-1)
        weight = (1 - pt) ** self.gamma
        ce = -(soft * F.log_softmax(logits, -1)).sum(-1)
        return (weight * ce).mean()


class ClsHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.focal = nn.Linear(16, 4), SoftFocal()

    def forward(self, h, soft):
        return self.focal(self.fc(h), soft)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.heads = nn.ModuleDict(dict(cls=ClsHead()))

    def forward(self, x, soft):
        return self.heads["cls"](self.body(x), soft)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        soft = F.one_hot(torch.randint(0, 4, (10,), generator=g), 4).float() * 0.9 + 0.025
        if i == 3:
            soft[6] = 1.3                # votes were added up, not averaged
        batches.append((torch.randn(10, 6, generator=g), soft))
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
