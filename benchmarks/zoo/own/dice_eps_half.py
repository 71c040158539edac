import torch, torch.nn as nn

CASE = dict(
    id="dice_eps_half",
    title=(
        "Soft Dice with smooth=1e-8 in half precision: a slice without organ and a confident background net "
        "give 0 / 0"
    ),
    source="nasa/delta#115; Project-MONAI/MONAI#120; jakeret/tf_unet#74", fidelity="direct",
    precision="fp16", phase="forward", cause="eps_underflow", cause_alt=["zero_over_zero"], op=["div"],
    module="criterion.dice", line="score = (2 * inter + self.smooth) / (total + self.smooth)",
    fix="Use a smoothing term that exists in half (1e-4 or 1.0), or compute the Dice term in fp32.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="loss",
)


class Dice(nn.Module):
    def __init__(self, smooth=1e-8):
        super().__init__()
        self.smooth = smooth

    def forward(self, prob, mask):
        inter = (prob * mask).flatten(1).sum(1)
        total = prob.flatten(1).sum(1) + mask.flatten(1).sum(1)
        score = (2 * inter + self.smooth) / (total + self.smooth)
        return 1 - score.mean()


class SegLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.dice = Dice()

    def forward(self, logits, mask):
        return self.dice(torch.sigmoid(logits), mask.to(logits.dtype))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.up = nn.Conv2d(8, 1, 3, padding=1)
        self.criterion = SegLoss()

    def forward(self, x):
        return self.up(self.down(x))


def loss_fn(model, batch):
    scan, mask = batch
    return model.criterion(model(scan), mask).float()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(6):
        mask = (torch.rand(3, 1, 8, 8, generator=g) > 0.7).float()
        batches.append((torch.rand(3, 1, 8, 8, generator=g), mask))
    m = UNet()
    with torch.no_grad():
        m.down[0].weight.abs_()
        m.up.weight.abs_().neg_()
        m.up.bias.fill_(1.0)
    batches[3][1][1] = 0.0           # no organ on this slice
    batches[3][0][1] = 60.0          # saturated scan: every logit is far below -17
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
