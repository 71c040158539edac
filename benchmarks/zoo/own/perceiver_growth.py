import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="perceiver_growth", title="Perceiver cross-attention without query scaling and with a hot learning rate for the latents: the logits grow every step until they leave the fp16 range",
    source="lucidrains/imagen-pytorch#129; Peterande/D-FINE#199; huggingface/transformers#12225", fidelity="adapted",
    precision="fp16", phase="forward", cause="attention_logit_growth", cause_alt=["overflow_fp16"],
    op=["einsum", "bmm", "matmul"], module="reader.cross", line='sim = torch.einsum("bhid,bhjd->bhij", q, k)',
    fix="Scale the queries before the product, normalise q and k, or lower the learning rate of the latents.",
    recoverable_by=["lower_lr", "fp32", "fix_code"], step=21, symptom="loss", seeds=[0],
)


class Cross(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.q, self.kv = h, nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False)

    def forward(self, lat, x):
        B, N, D = x.shape
        split = lambda t: t.view(B, -1, self.h, D // self.h).transpose(1, 2)
        k, v = map(split, self.kv(x).chunk(2, -1))
        q = split(self.q(lat))
        sim = torch.einsum("bhid,bhjd->bhij", q, k)
        p = torch.softmax(sim.float() * (D // self.h) ** -0.5, -1)
        return (p.to(v.dtype) @ v).transpose(1, 2).reshape(B, -1, D)


class Reader(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.latents, self.norm, self.cross = nn.Parameter(torch.randn(4, d)), nn.LayerNorm(d), Cross(d, 2)

    def forward(self, x):
        lat = self.latents.expand(x.size(0), -1, -1)
        return lat * 0.01 + self.cross(lat, self.norm(x))


class Perceiver(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.inp, self.reader, self.out = nn.Linear(6, d), Reader(d), nn.Linear(d, 4)

    def forward(self, x):
        return self.out(self.reader(self.inp(x)).mean(1))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(60):
        x = torch.randn(8, 10, 6, generator=g)
        batches.append((x, x[:, :, 0].amax(1).mul(2).long().clamp(0, 3)))
    m = Perceiver()
    hot = [m.reader.latents, m.reader.cross.q.weight, m.reader.cross.kv.weight]
    ids = {id(p) for p in hot}
    opt = torch.optim.Adam([dict(params=hot, lr=0.2), dict(params=[p for p in m.parameters() if id(p) not in ids], lr=1e-3)])
    return m, opt, batches, loss_fn
