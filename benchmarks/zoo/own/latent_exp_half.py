import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="latent_exp_half", title="Segmentation auxiliary InfoNCE in fp16: exp of an un-scaled pixel similarity is 0 for every negative and the positive, log(0 / 0) starts as 0 / 0",
    source="pytorch/pytorch#41663; huggingface/transformers#12225 (fp16 underflow / overflow)", fidelity="adapted",
    precision="fp16", phase="forward", cause="zero_over_zero", cause_alt=["eps_underflow", "div_by_zero"], op=["div"],
    module="aux.nce", line="share = pos / (pos + neg.sum(1))",
    fix="Use log_softmax over the similarities (in fp32).",
    recoverable_by=["skip", "fp32", "fix_code"], step=4, symptom="loss",
)


class NCE(nn.Module):
    def forward(self, q, k):
        d = (q[:, None] - k[None]).abs().sum(-1)
        e = torch.exp(-d)
        pos = e.diagonal()
        neg = e * (1 - torch.eye(e.size(0), dtype=e.dtype))
        share = pos / (pos + neg.sum(1))
        return -torch.log(share.float()).mean()


class Aux(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.nce = nn.Linear(d, 6), nn.Linear(d, 6), NCE()

    def forward(self, h):
        return self.nce(self.q(h), self.k(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.cls, self.aux = nn.Linear(5, 12), nn.Linear(12, 3), Aux(12)


def loss_fn(model, batch):
    x, y = batch
    h = F.gelu(model.enc(x))
    return F.cross_entropy(model.cls(h), y) + 0.1 * model.aux(h)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(6, 5, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(6)]
    batches[4][0][2] *= 60.0
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
