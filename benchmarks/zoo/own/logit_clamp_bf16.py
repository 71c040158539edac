import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="logit_clamp_bf16", title="Reference points are clamped to [1e-5, 1 - 1e-5] before the inverse sigmoid; in bf16 the upper bound is exactly 1 and log(1 - x) is -inf",
    source="Peterande/D-FINE#199", fidelity="adapted",
    precision="bf16", phase="forward", phase_alt=["backward"], cause="eps_underflow", cause_alt=["log_of_zero"], op=["log"],
    module="decoder.layers.0.refine", line="return torch.log(x) - torch.log(1 - x)",
    fix="Use an eps of 1e-2 in bf16, or compute the inverse sigmoid in fp32.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="grad",
)


class InverseSigmoid(nn.Module):
    def forward(self, x, eps=1e-5):
        x = x.clamp(eps, 1 - eps)
        return torch.log(x) - torch.log(1 - x)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.delta, self.refine = nn.Linear(d, 2), InverseSigmoid()

    def forward(self, q, ref):
        d = self.delta(q)
        return torch.sigmoid(self.refine(ref.to(d.dtype)) + d)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(12), Layer(12)])

    def forward(self, q, ref):
        for l in self.layers:
            ref = l(q, ref)
        return ref


class Detr(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.decoder = nn.Linear(6, 12), Decoder()

    def forward(self, x, ref):
        return self.decoder(F.gelu(self.query(x)), ref)


def loss_fn(model, batch):
    x, ref, y = batch
    pred = model(x, ref).float()
    return F.l1_loss(pred, y) + F.mse_loss(torch.logit(pred, eps=1e-6), torch.logit(y))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(6, 6, generator=g), torch.rand(6, 2, generator=g) * 0.8 + 0.1, torch.rand(6, 2, generator=g) * 0.8 + 0.1) for _ in range(5)]
    batches[3][1][4, 1] = 1.0  # a box centre on the image border
    m = Detr()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
