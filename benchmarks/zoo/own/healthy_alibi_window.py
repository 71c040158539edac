import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="healthy_alibi_window", title="nn.TransformerEncoderLayer with a float mask: linear distance bias inside the window, -inf outside, every token sees itself",
    source="huggingface/transformers#38690 (mask built from -inf)", fidelity="control",
    precision="bf16", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[], step=None,
)


class Encoder(nn.Module):
    def __init__(self, d=16, n=10, w=3):
        super().__init__()
        self.emb = nn.Embedding(30, d)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(d, 30)
        gap = (torch.arange(n)[:, None] - torch.arange(n)[None]).float()
        self.register_buffer("bias", torch.where((gap >= 0) & (gap < w), -0.5 * gap, torch.full_like(gap, float("-inf"))))

    def forward(self, ids):
        x = self.emb(ids)
        for l in self.layers:
            x = l(x, src_mask=self.bias)
        return self.head(x)


def loss_fn(model, batch):
    z = model(batch[:, :-1])
    return F.cross_entropy(z.flatten(0, 1).float(), batch[:, 1:].flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Encoder()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), [torch.randint(0, 30, (4, 11), generator=g) for _ in range(8)], loss_fn
