import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="mask_bce_sum", title="Mask loss sums the weighted BCE over all pixels and queries instead of averaging: the gradient that enters the fp16 head passes 65504",
    source="facebookresearch/fairseq#4555; Peterande/D-FINE#199", fidelity="adapted",
    precision="fp16", phase="backward", cause="overflow_fp16", op=["to_copy", "_to_copy", "to", "mm", "bmm", "linear", "addmm", "mul", "div", "convolution"],
    module="criterion", module_alt=[""], line='return F.binary_cross_entropy_with_logits(z.float(), y, weight=w, reduction="sum")',
    fix="Average over pixels and matched queries.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="grad",
    crude_disagrees="the overflow happens in the cast or matmul of the mask head's backward, the blame lies on the un-normalised sum",
)


class MaskLoss(nn.Module):
    def forward(self, z, y, w):
        return F.binary_cross_entropy_with_logits(z.float(), y, weight=w, reduction="sum")


class MaskHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.pix, self.query = nn.Conv2d(3, 8, 3, padding=1), nn.Embedding(4, 8)
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        return torch.einsum("qc,bchw->bqhw", self.proj(self.query.weight), self.pix(x))


class Former(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.criterion = MaskHead(), MaskLoss()


def loss_fn(model, batch):
    x, y, w = batch
    return model.criterion(model.head(x), y, w)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(2, 3, 12, 12, generator=g), (torch.rand(2, 4, 12, 12, generator=g) > 0.5).float(), torch.ones(2, 4, 12, 12)) for _ in range(5)]
    batches[3][2][1, 2] = 2e5  # boundary weights of a tiny instance, 1 / area of its border
    m = Former()
    return m, torch.optim.SGD(m.parameters(), 1e-7), batches, loss_fn
