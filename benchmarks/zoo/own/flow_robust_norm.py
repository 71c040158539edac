import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="flow_robust_norm", title="Optical-flow fine-tuning uses (|d| + 0)^0.4 as robust norm: pixels that are predicted exactly have an infinite slope",
    source="pytorch/pytorch#36493, #45720 (p < 1 norms)", fidelity="adapted",
    precision="fp16", phase="backward", cause="sqrt_grad_at_zero", cause_alt=["zero_times_inf"], op=["pow"],
    module="criterion.robust", line="return torch.pow(d.abs().sum(1) + self.eps, self.q)",
    fix="Use the published eps = 0.01 inside the power.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class Robust(nn.Module):
    def __init__(self, eps=0.0, q=0.4):
        super().__init__()
        self.eps, self.q = eps, q

    def forward(self, d):
        return torch.pow(d.abs().sum(1) + self.eps, self.q)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.robust = Robust()

    def forward(self, levels, gt):
        return sum(w * self.robust(f.float() - gt).mean() for w, f in levels)


class FlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.criterion = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1), Criterion()

    def forward(self, pair, valid):
        f = self.b(F.leaky_relu(self.a(pair), 0.1)) * valid
        return [(0.7, f), (0.3, f * 0.5)]


def loss_fn(model, batch):
    pair, valid, gt = batch
    return model.criterion(model(pair, valid), gt)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(2, 2, 8, 8, generator=g), torch.ones(2, 1, 8, 8), torch.randn(2, 2, 8, 8, generator=g)) for _ in range(5)]
    batches[3][1][1, 0, :3] = 0.0  # sky: both flows are set to 0
    batches[3][2][1, :, :3] = 0.0
    m = FlowNet()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
