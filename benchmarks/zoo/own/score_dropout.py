import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="score_dropout", title="Dropout is applied to the masked attention scores instead of the weights: -inf times 0 is NaN",
    source="pytorch/pytorch#41508; flashinfer-ai/flashinfer#4401 (NaN * 0)", fidelity="adapted",
    precision="fp16", phase="forward", cause="zero_times_inf", op=["dropout", "native_dropout", "mul", "bernoulli"],
    module="enc.0.attn.drop", module_alt=["enc.0.attn"], line="s = self.drop(s.masked_fill(~keep[:, None], float(\"-inf\")))",
    fix="Apply dropout after the softmax.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Attn(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qk, self.v, self.drop = nn.Linear(d, 2 * d), nn.Linear(d, d), nn.Dropout(0.3)

    def forward(self, x, keep):
        q, k = self.qk(x).chunk(2, -1)
        s = torch.einsum("bid,bjd->bij", q, k) * x.size(-1) ** -0.5
        s = self.drop(s.masked_fill(~keep[:, None], float("-inf")))
        return torch.softmax(s, -1) @ self.v(x)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn, self.norm = Attn(d), nn.LayerNorm(d)

    def forward(self, x, keep):
        return self.norm(x + self.attn(x, keep))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.enc, self.out = nn.Embedding(40, 16), nn.ModuleList([Layer(16), Layer(16)]), nn.Linear(16, 5)

    def forward(self, ids, keep):
        x = self.emb(ids)
        for l in self.enc:
            x = l(x, keep)
        return self.out(x)


def loss_fn(model, batch):
    ids, keep, y = batch
    z = model(ids, keep)
    return F.cross_entropy(z[keep], y[keep])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        keep = torch.ones(4, 7, dtype=torch.bool)
        if i == 3:  # the first batch that needs padding
            keep[1, 4:] = False
            keep[3, 5:] = False
        batches.append((torch.randint(0, 40, (4, 7), generator=g), keep, torch.randint(0, 5, (4, 7), generator=g)))
    m = Tagger()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
