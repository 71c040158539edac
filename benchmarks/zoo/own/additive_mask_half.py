import math

import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="additive_mask_half",
    title="Additive attention mask (1 - keep) * -1e9 in fp16 becomes -inf; an empty document is NaN after softmax",
    source="NVIDIA/apex#93; huggingface/transformers#17306; bentrevett/pytorch-seq2seq#191",
    fidelity="direct",
    precision="fp16",
    phase="forward",
    cause="overflow_fp16",
    cause_alt=["masked_softmax_all_neg_inf"],
    op=["mul", "softmax", "add"],
    module="layers.0.attend",
    line="prob = torch.softmax(score + (1.0 - keep.to(score.dtype)) * -1e9, dim=-1)",
    fix="Use torch.finfo(score.dtype).min (or -1e4) for the mask, or drop empty documents.",
    recoverable_by=["skip", "fp32", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class Attend(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d, d)
        self.key = nn.Linear(d, d)
        self.value = nn.Linear(d, d)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, keep):
        q = self.split(self.query(x))
        k = self.split(self.key(x))
        v = self.split(self.value(x))
        score = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        prob = torch.softmax(score + (1.0 - keep.to(score.dtype)) * -1e9, dim=-1)
        return (prob @ v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attend = Attend(d, 2)
        self.norm = nn.LayerNorm(d)

    def forward(self, x, keep):
        return self.norm(x + self.attend(x, keep))


class Ranker(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.embed = nn.Embedding(40, d)
        self.layers = nn.ModuleList([Layer(d), Layer(d)])
        self.score = nn.Linear(d, 1)

    def forward(self, ids, lengths):
        keep = (torch.arange(ids.size(1))[None] < lengths[:, None]).float()
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, keep[:, None, None, :])
        return self.score(x.mean(1)).squeeze(-1)


def loss_fn(model, batch):
    (ids, lengths), target = batch
    return F.binary_cross_entropy_with_logits(model(ids, lengths).float(), target)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        lengths = torch.randint(2, 9, (6,), generator=g)
        if i == 3:
            lengths[4] = 0
        ids = torch.randint(0, 40, (6, 8), generator=g)
        batches.append(((ids, lengths), torch.randint(0, 2, (6,), generator=g).float()))
    m = Ranker()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
