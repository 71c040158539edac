import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="layernorm_eps_half",
    title="Hand-written LayerNorm with eps 1e-12 in fp16: a padded row has variance 0, rsqrt(0) = inf, 0 * inf",
    source="deepspeedai/DeepSpeed#581; tensorflow/tensorflow#24979; pytorch/pytorch#41527",
    fidelity="direct",
    precision="fp16",
    phase="forward",
    cause="eps_underflow",
    cause_alt=["zero_times_inf", "div_by_zero", "zero_over_zero"],
    op=["rsqrt", "mul"],
    module="encoder.1.norm",
    line="return self.weight * (centred * torch.rsqrt(var + self.eps)) + self.bias",
    fix="Use an eps that half can represent (1e-5), or normalise in fp32.",
    recoverable_by=["skip", "fp32", "fix_code"],
    step=3,
    symptom="grad",
)


class BertNorm(nn.Module):
    def __init__(self, d, eps=1e-12):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d))
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        var = (centred * centred).mean(-1, keepdim=True)
        return self.weight * (centred * torch.rsqrt(var + self.eps)) + self.bias


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc = nn.Linear(d, d, bias=False)
        self.norm = BertNorm(d)

    def forward(self, x):
        return self.norm(torch.sin(3.0 * self.fc(x)))


class Tagger(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.inp = nn.Linear(5, d)
        self.encoder = nn.Sequential(nn.Tanh(), Layer(d), Layer(d))
        self.out = nn.Linear(d, 3)

    def forward(self, x, keep):
        h = self.encoder(self.inp(x) * keep.unsqueeze(-1))
        return self.out(h)


def loss_fn(model, batch):
    x, keep, tag = batch
    return F.cross_entropy(model(x, keep).float().flatten(0, 1), tag.flatten(), ignore_index=-1)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        keep = torch.ones(3, 6)
        tag = torch.randint(0, 3, (3, 6), generator=g)
        if i == 3:
            keep[1, 4:] = 0.0
            tag[1, 4:] = -1
        batches.append((torch.randn(3, 6, 5, generator=g), keep, tag))
    m = Tagger()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
