import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="ce_zero_weights", title="Weighted cross-entropy with weight 0 for the background class: a tile with background only divides by a total weight of 0",
    source="pytorch/pytorch#61309, #14184 (weighted mean divides by the sum of weights)", fidelity="adapted",
    precision="bf16", phase="forward", cause="zero_over_zero", op=["nll_loss", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward", "cross_entropy", "cross_entropy_loss"],
    module="head.loss", line="return F.cross_entropy(z.float(), y, weight=self.weight)",
    fix="Sum and divide by the clamped total weight, or give the background a small weight.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class SegLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([0.0, 1.0, 2.0]))

    def forward(self, z, y):
        return F.cross_entropy(z.float(), y, weight=self.weight)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.loss = nn.Conv2d(8, 3, 1), SegLoss()


class Seg(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), Head()


def loss_fn(model, batch):
    x, y = batch
    return model.head.loss(model.head.conv(model.body(x)), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(2, 3, 6, 6, generator=g), torch.randint(0, 3, (2, 6, 6), generator=g)) for _ in range(5)]
    batches[3][1].zero_()
    m = Seg()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
