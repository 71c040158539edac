import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="logit_scale_growth",
    title=(
        "Learned temperature of a contrastive model without the clamp: exp(logit_scale) grows until fp16 "
        "logits overflow"
    ),
    source="openai/CLIP#46, #530; kornia/kornia#3481", fidelity="direct",
    precision="fp16", phase="forward", cause="overflow_fp16",
    cause_alt=["attention_logit_growth", "gradient_explosion", "exp_overflow"], op=["mul", "exp", "mm", "matmul"],
    module="contrast", line="return self.logit_scale.exp() * (img @ txt.t())",
    fix="Clamp logit_scale to log(100) and give it a lower learning rate.",
    recoverable_by=["lower_lr", "fp32", "fix_code"], step=19, symptom="loss", seeds=[0],
)


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, img, txt):
        return self.logit_scale.exp() * (img @ txt.t())


class DualEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(10, 12)
        self.text = nn.Linear(10, 12)
        self.contrast = Contrast()

    def forward(self, a, b):
        img = F.normalize(self.image(a), dim=-1)
        txt = F.normalize(self.text(b), dim=-1)
        return self.contrast(img, txt)


def loss_fn(model, batch):
    logits = model(*batch).float()
    positive = logits.diagonal()
    return (logits.mean(1) - positive).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(40):
        a = torch.randn(8, 10, generator=g)
        batches.append((a, a))
    model = DualEncoder()
    model.text.load_state_dict(model.image.state_dict())
    groups = [
        {"params": list(model.image.parameters()) + list(model.text.parameters()), "lr": 1e-4},
        {"params": [model.contrast.logit_scale], "lr": 0.5},
    ]
    return model, torch.optim.Adam(groups), batches, loss_fn
