import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="ntxent_exp_half",
    title="NT-Xent exponentiates cosine / 0.07 in half precision: two views with cosine above 0.78 exceed 65504",
    source="Lightning-Universe/lightning-bolts#811, #320; lightly-ai/lightly#1633", fidelity="adapted",
    precision="fp16", phase="forward", cause="overflow_fp16", cause_alt=["exp_overflow"], op=["exp"],
    module="ntxent", line="pos = torch.exp(agree / self.tau)",
    fix="Use cross_entropy on the logits (log-sum-exp), or compute the loss in fp32.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="loss",
)


class NTXent(nn.Module):
    def __init__(self, tau=0.07):
        super().__init__()
        self.tau = tau

    def forward(self, a, b):
        a, b = F.normalize(a.float(), dim=-1).half(), F.normalize(b.float(), dim=-1).half()
        agree = (a * b).sum(-1)
        others = a @ b.roll(1, 0).t()
        pos = torch.exp(agree / self.tau)
        neg = torch.exp(others.clamp(max=0.5) / self.tau).mean(-1)
        return (torch.log(pos + neg) - torch.log(pos)).float().mean()


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.proj, self.ntxent = nn.Linear(20, 32), nn.Linear(32, 24), NTXent()

    def forward(self, v1, v2):
        return self.ntxent(self.proj(torch.tanh(self.f(v1))), self.proj(torch.tanh(self.f(v2))))


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 20, generator=g), torch.randn(8, 20, generator=g)) for _ in range(6)]
    batches[3][1][2] = batches[3][0][2]     # the augmentation left this image unchanged
    m = SimCLR()
    with torch.no_grad():
        m.f.bias.zero_()
        m.proj.bias.zero_()
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
