import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="flash_lse_backward", title="Own fused attention Function returns 0 for a query without keys, but its backward recomputes exp(s - lse) with lse = -inf",
    source="flashinfer-ai/flashinfer#4401; tracel-ai/burn#4694; Dao-AILab/flash-attention#1930", fidelity="adapted",
    precision="fp32", phase="backward", cause="custom_backward_bug", cause_alt=["inf_minus_inf"], op=["sub"],
    module="layers.1.attn.kernel", line="p = torch.exp(s - lse)",
    fix="Replace an lse of -inf by 0 in the backward (as the forward does).",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="grad",
)


class FusedAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, keep):
        s = (q @ k.transpose(-2, -1)).masked_fill(~keep, float("-inf"))
        top = s.amax(-1, keepdim=True)
        safe = torch.where(top == float("-inf"), torch.zeros_like(top), top)
        e = torch.exp(s - safe)
        z = e.sum(-1, keepdim=True)
        ctx.save_for_backward(q, k, v, keep, safe + torch.log(z))
        return (e / z.clamp(min=1e-20)) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, keep, lse = ctx.saved_tensors
        s = (q @ k.transpose(-2, -1)).masked_fill(~keep, float("-inf"))
        p = torch.exp(s - lse)
        dv = p.transpose(-2, -1) @ g
        dp = g @ v.transpose(-2, -1)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        return ds @ k, ds.transpose(-2, -1) @ q, dv, None


class Kernel(nn.Module):
    def forward(self, q, k, v, keep):
        return FusedAttn.apply(q * q.size(-1) ** -0.5, k, v, keep)


class Attn(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv, self.kernel = nn.Linear(d, 3 * d), Kernel()

    def forward(self, x, keep):
        return self.kernel(*self.qkv(x).chunk(3, -1), keep)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(d), Attn(d)

    def forward(self, x, keep):
        return x + self.attn(self.norm(x), keep)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.layers, self.out = nn.Embedding(20, 12), nn.ModuleList([Layer(12), Layer(12)]), nn.Linear(12, 20)

    def forward(self, ids, keep):
        x = self.emb(ids)
        x = self.layers[0](x, keep | torch.eye(ids.size(1), dtype=torch.bool))
        return self.out(self.layers[1](x, keep))


def loss_fn(model, batch):
    ids, keep = batch
    z = model(ids, keep)
    return F.cross_entropy(z.flatten(0, 1), ids.flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        keep = torch.ones(6, 6, dtype=torch.bool).tril().repeat(3, 1, 1)
        if i == 3:
            keep[1, :2] = False  # two documents were packed, the second one starts with a hole
        batches.append((torch.randint(0, 20, (3, 6), generator=g), keep))
    m = Model()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
