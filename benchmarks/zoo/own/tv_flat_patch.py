import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="tv_flat_patch", title="Isotropic total variation sqrt(dx^2 + dy^2) of a restored image: a saturated region is perfectly flat",
    source="mpariente/pytorch_stoi#14; vccimaging/DeepLens#105 (sqrt(0) in the loss)", fidelity="adapted",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", op=["sqrt"],
    module="tv", line="return (dx.square() + dy.square()).sqrt().mean()",
    fix="Add eps under the root.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class TotalVariation(nn.Module):
    def forward(self, x):
        dx = x[..., :-1, 1:] - x[..., :-1, :-1]
        dy = x[..., 1:, :-1] - x[..., :-1, :-1]
        return (dx.square() + dy.square()).sqrt().mean()


class Restorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.body, self.tv = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 1, 1), TotalVariation()

    def forward(self, x):
        return x * (1 + 0.1 * self.body(torch.tanh(self.gain(x))))


def loss_fn(model, batch):
    x, y = batch
    out = model(x)
    return F.l1_loss(out, y) + 0.05 * model.tv(out)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(2, 1, 8, 8, generator=g), torch.rand(2, 1, 8, 8, generator=g)) for _ in range(5)]
    batches[3][0][1, 0, 2:6, 2:6] = 1.0
    m = Restorer()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
