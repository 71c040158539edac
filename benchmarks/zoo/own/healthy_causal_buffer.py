import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="healthy_causal_buffer",
    title="The causal mask is a registered buffer full of -inf above the diagonal; every row keeps its own token",
    source="karpathy/minGPT (causal mask as a buffer); huggingface/transformers#9295 (false alarms of inf checks)",
    fidelity="control",
    precision="bf16", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class CausalAttention(nn.Module):
    def __init__(self, d, t):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer("causal", torch.full((t, t), float("-inf")).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        s = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
        p = torch.softmax(s + self.causal[:x.size(1), :x.size(1)], -1)
        return self.out(p.to(v.dtype) @ v)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.attn = nn.Embedding(30, 16), CausalAttention(16, 12)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 30)

    def forward(self, ids):
        x = self.tok(ids)
        return self.head(self.norm(x + self.attn(x)))


def loss_fn(model, batch):
    out = model(batch[:, :-1])
    return F.cross_entropy(out.reshape(-1, 30).float(), batch[:, 1:].reshape(-1))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, 30, (4, 10), generator=g) for _ in range(8)]
    m = GPT()
    return m, torch.optim.AdamW(m.parameters(), 1e-2), batches, loss_fn
