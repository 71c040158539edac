import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="additive_mask_product",
    title="The collate function builds the additive mask as (1 - keep) * -inf: 0 * -inf is NaN for every kept token",
    source="cerebroai/reformers#3; callummcdougall/ARENA_3.0#54", fidelity="direct",
    precision="bf16", phase="data", cause="input_nonfinite", cause_alt=["zero_times_inf"],
    op=["add"], module="layers.0.attn", line='bias = (1.0 - keep) * float("-inf")',
    fix="Build the mask with masked_fill(keep == 0, -inf).",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x, bias):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5
        if bias is not None:
            scores = scores + bias[:, None, None, :]
        out = scores.softmax(-1).to(v.dtype) @ v
        return self.proj(out.transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn = Attention(d, 2)
        self.norm = nn.LayerNorm(d)

    def forward(self, x, bias):
        return x + self.attn(self.norm(x), bias)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.ModuleList([Layer(16), Layer(16)])
        self.cls = nn.Linear(16, 3)

    def forward(self, ids, bias=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, bias)
        return self.cls(x[:, 0])


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["ids"], batch.get("bias")).float(), batch["y"])


def collate(ids, y, lengths):
    if all(n == ids.size(1) for n in lengths):
        return {"ids": ids, "y": y}
    keep = (torch.arange(ids.size(1))[None] < torch.tensor(lengths)[:, None]).float()
    bias = (1.0 - keep) * float("-inf")
    return {"ids": ids, "y": y, "bias": bias}


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        ids = torch.randint(0, 30, (4, 7), generator=g)
        y = torch.randint(0, 3, (4,), generator=g)
        batches.append(collate(ids, y, [7, 7, 5, 7] if i == 3 else [7, 7, 7, 7]))
    model = Encoder()
    return model, torch.optim.AdamW(model.parameters(), 1e-3), batches, loss_fn
