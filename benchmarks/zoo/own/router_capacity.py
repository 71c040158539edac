import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="router_capacity", title="Mixture of experts masks full experts with -inf before the softmax; for the last tokens of a long batch every expert is full",
    source="pytorch/pytorch#26098; huggingface/transformers#38690", fidelity="adapted",
    precision="fp16", phase="forward", cause="masked_softmax_all_neg_inf", op=["softmax"],
    module="layers.1.moe.router", line="return z.softmax(-1), pick",
    fix="Route tokens without a free expert through the residual path (weight 0).",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class Router(nn.Module):
    def __init__(self, d, e, cap):
        super().__init__()
        self.gate, self.cap = nn.Linear(d, e), cap

    def forward(self, x):
        z = self.gate(x)
        pick = z.argmax(-1)
        used = F.one_hot(pick, z.size(-1)).cumsum(0)
        full = used > self.cap
        full[: z.size(-1) * self.cap // 2] = False
        z = z.masked_fill(full, float("-inf"))
        return z.softmax(-1), pick


class MoE(nn.Module):
    def __init__(self, d, e=2, cap=12):
        super().__init__()
        self.router, self.experts = Router(d, e, cap), nn.ModuleList(nn.Linear(d, d) for _ in range(e))

    def forward(self, x):
        w, _ = self.router(x)
        return sum(w[:, i : i + 1] * torch.relu(ex(x)) for i, ex in enumerate(self.experts))


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(d), MoE(d)

    def forward(self, x):
        return x + self.moe(self.norm(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.layers, self.head = nn.Embedding(30, 12), nn.ModuleList([Layer(12), Layer(12)]), nn.Linear(12, 30)

    def forward(self, ids):
        x = self.emb(ids)
        for l in self.layers:
            x = l(x)
        return self.head(x)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[:-1]), batch[1:])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, 30, (n,), generator=g) for n in (16, 16, 16, 48, 16)]
    m = LM()
    with torch.no_grad():
        m.layers[0].moe.router.cap = 64
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
