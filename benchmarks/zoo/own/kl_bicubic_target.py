import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="kl_bicubic_target", title="Saliency training: fixation maps are resized bicubically, the overshoot leaves negative densities and kl_div takes t log t of them",
    source="pytorch/pytorch#69230; samyak0210/saliency#30", fidelity="adapted",
    precision="fp32", phase="forward", phase_alt=["data"], cause="label_out_of_domain", cause_alt=["log_of_negative"], op=["xlogy", "kl_div"],
    module="", line='return F.kl_div(logp.flatten(1), density.flatten(1), reduction="batchmean")',
    fix="Clamp the resized map at 0 and renormalise it.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


class SalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.readout = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        z = self.readout(self.enc(x))
        return z.flatten(1).log_softmax(-1).view_as(z)


def loss_fn(model, batch):
    img, density = batch
    logp = model(img)
    return F.kl_div(logp.flatten(1), density.flatten(1), reduction="batchmean")


def fixation_map(g, sharp):
    m = torch.zeros(1, 1, 4, 4)
    if sharp:
        m[0, 0, 1, 2] = 1.0
    else:
        m += torch.rand(1, 1, 4, 4, generator=g) * 0.2 + 1.0
    m = F.interpolate(m, size=(8, 8), mode="bicubic", align_corners=False)
    return m / m.sum()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        maps = torch.cat([fixation_map(g, i == 3 and j == 1) for j in range(3)])
        batches.append((torch.randn(3, 3, 8, 8, generator=g), maps))
    m = SalNet()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
