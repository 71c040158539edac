import torch, torch.nn as nn

CASE = dict(
    id="fn_inverse_distance", title="Point-cloud upsampling has its own autograd Function for inverse-distance weights: its forward divides by a distance of 0",
    source="own (inverse-distance interpolation of point clouds)", fidelity="analogue",
    precision="fp32", phase="forward", cause="div_by_zero", op=["reciprocal", "div"],
    module="up", line="w = 1.0 / dist", fix="Add an eps to the distance.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=2, symptom="loss",
)


class InverseWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, feats, dist):
        w = 1.0 / dist
        w = w / w.sum(-1, keepdim=True)
        ctx.save_for_backward(w)
        return torch.einsum("bnk,bkc->bnc", w, feats)

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return torch.einsum("bnk,bnc->bkc", w, grad), None


class Upsample(nn.Module):
    def forward(self, dense, sparse, feats):
        dist = (dense[:, :, None] - sparse[:, None]).square().sum(-1)
        return InverseWeights.apply(feats, dist)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.up, self.head = nn.Linear(3, 8), Upsample(), nn.Linear(8, 2)

    def forward(self, dense, sparse):
        return self.head(self.up(dense, sparse, self.enc(sparse)))


def loss_fn(model, batch):
    dense, sparse, y = batch
    return nn.functional.cross_entropy(model(dense, sparse).flatten(0, 1), y.flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = []
    for step in range(4):
        dense, sparse = torch.randn(4, 9, 3, generator=g), torch.randn(4, 3, 3, generator=g)
        if step == 2:
            dense[1, 4] = sparse[1, 2]
        batches.append((dense, sparse, torch.randint(0, 2, (4, 9), generator=g)))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
