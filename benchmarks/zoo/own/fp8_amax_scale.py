import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="fp8_amax_scale", title="Delayed scaling stores 448 / amax for the next step; a batch in which the expert gets only zeros leaves an infinite scale in the buffer",
    source="NVIDIA/TransformerEngine#786; NVIDIA/Model-Optimizer#381; huggingface/kernels-community#680", fidelity="adapted",
    precision="bf16", phase="buffer", cause="buffer_corrupted", cause_alt=["div_by_zero"], op=["reciprocal", "div", "mul", "copy"],
    module="experts.1.cast", line="self.scale.copy_(448.0 / x.detach().abs().amax())",
    fix="Keep the old scale when amax is 0.",
    recoverable_by=["fix_code"], step=3, loss_step=4, symptom="buffer",
)


class FakeCast(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        s = self.scale.clone()
        q = (x * s).clamp(-448.0, 448.0) / s
        with torch.no_grad():
            self.scale.copy_(448.0 / x.detach().abs().amax())
        return x + (q - x).detach() * 0.5 + (q - q.detach())


class Expert(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.cast, self.fc = FakeCast(), nn.Linear(d, d)

    def forward(self, x):
        return self.fc(self.cast(x.float()))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.experts, self.out = nn.Linear(6, 8), nn.ModuleList([Expert(8), Expert(8)]), nn.Linear(8, 3)

    def forward(self, x, route):
        h = torch.tanh(self.inp(x))
        y = sum(e(h * (route == i).unsqueeze(-1)) for i, e in enumerate(self.experts))
        return self.out(y)


def loss_fn(model, batch):
    x, route, y = batch
    return F.cross_entropy(model(x, route), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        route = torch.arange(10) % 2
        if i == 3:
            route[:] = 0
        batches.append((torch.randn(10, 6, generator=g), route, torch.randint(0, 3, (10,), generator=g)))
    m = MoE()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
