import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="class_center_empty", title="Class centres are moved towards the batch mean of every class; a class that is absent has the mean of nothing, its centre buffer is NaN and used three steps later",
    source="RezaKakooee/space_layout_gym#4 (mean of an empty tensor); facebookresearch/SparseConvNet#190", fidelity="adapted",
    precision="fp32", phase="buffer", cause="buffer_corrupted", cause_alt=["zero_over_zero"], op=["mean"],
    module="heads.center", line="self.centers[c].lerp_(f[y == c].mean(0), self.m)",
    fix="Skip classes that do not occur in the batch.",
    recoverable_by=["fix_code", "fix_data"], step=3, loss_step=6, symptom="buffer",
)


class CenterLoss(nn.Module):
    def __init__(self, k, d, m=0.2):
        super().__init__()
        self.k, self.m = k, m
        self.register_buffer("centers", torch.zeros(k, d))

    def forward(self, f, y, use):
        loss = (f - self.centers[y]).pow(2).mean() if use else f.new_zeros(())
        with torch.no_grad():
            for c in range(self.k):
                self.centers[c].lerp_(f[y == c].mean(0), self.m)
        return loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.heads = nn.ModuleDict(dict(cls=nn.Linear(6, 4), center=CenterLoss(4, 6)))


def loss_fn(model, batch):
    x, y, use = batch
    f = model.body(x)
    return F.cross_entropy(model.heads["cls"](f), y) + 0.1 * model.heads["center"](f, y, use)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(8):
        y = torch.arange(12) % 4
        if i == 3:
            y[y == 2] = 0
        batches.append((torch.randn(12, 8, generator=g), y, i >= 6))
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
