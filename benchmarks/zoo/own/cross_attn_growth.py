import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="cross_attn_growth",
    title="Unscaled cross-attention with a high learning rate: the logits grow step by step and leave the fp16 range",
    source="ultralytics/ultralytics#24990; alibaba/Pai-Megatron-Patch#244", fidelity="adapted",
    precision="fp16", phase="forward", cause="attention_logit_growth", cause_alt=["overflow_fp16"],
    op=["einsum", "bmm", "matmul"], module="decoder.1.cross",
    line='logits = torch.einsum("bqd,bkd->bqk", self.to_q(x), self.to_k(memory))',
    fix="Scale the query by d ** -0.5 and normalise q and k; lower the learning rate.",
    recoverable_by=["lower_lr", "fp32", "fix_code"], step=15, symptom="loss", seeds=[0],
)


class CrossAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.to_q = nn.Linear(d, d, bias=False)
        self.to_k = nn.Linear(d, d, bias=False)
        self.to_v = nn.Linear(d, d, bias=False)

    def forward(self, x, memory):
        logits = torch.einsum("bqd,bkd->bqk", self.to_q(x), self.to_k(memory))
        weights = logits.float().softmax(-1).to(logits.dtype)
        return torch.einsum("bqk,bkd->bqd", weights, self.to_v(memory))


class DecoderLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.cross = CrossAttention(d)

    def forward(self, x, memory):
        return x + self.cross(self.norm(x), memory)


class Captioner(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 5, d) * 0.5)
        self.patch = nn.Linear(12, d)
        self.norm = nn.LayerNorm(d)
        self.decoder = nn.ModuleList([DecoderLayer(d), DecoderLayer(d)])
        self.vocab = nn.Linear(d, 11)

    def forward(self, image):
        memory = self.norm(self.patch(image))
        x = self.query.expand(image.size(0), -1, -1)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.vocab(x)


def loss_fn(model, batch):
    logits = model(batch["image"]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch["caption"].flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(50):
        image = torch.randn(6, 9, 12, generator=g)
        batches.append({"image": image, "caption": torch.randint(0, 11, (6, 5), generator=g)})
    model = Captioner()
    hot = model.decoder[1].cross
    hot = [hot.to_q.weight, hot.to_k.weight]
    rest = [p for p in model.parameters() if all(p is not q for q in hot)]
    return model, torch.optim.AdamW([{"params": hot, "lr": 0.5}, {"params": rest}], lr=1e-3), batches, loss_fn
