import torch, torch.nn as nn

CASE = dict(
    id="double_min_mask", title="Masks of padded keys and padded queries are both filled with finfo.min and added: the sum is -inf, and an empty document has nothing else",
    source="huggingface/transformers#27114; NVIDIA-NeMo/Automodel#2658", fidelity="direct",
    precision="fp32", phase="forward", cause="masked_softmax_all_neg_inf", cause_alt=["overflow_any_precision"], op=["softmax", "add"],
    module="attn", module_alt=[""], line="", fix="Combine the masks with where or minimum instead of a sum.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=1, symptom="loss",
)


class Attn(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        w = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask).softmax(-1)
        return w @ v


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.attn, self.out = nn.Embedding(12, 8), Attn(8), nn.Linear(8, 12)

    def forward(self, ids, keep):
        lowest = torch.finfo(torch.float32).min
        keys = torch.zeros(*ids.shape, ids.shape[1]).masked_fill(~keep[:, None], lowest)
        queries = torch.zeros_like(keys).masked_fill(~keep[:, :, None], lowest)
        return self.out(self.attn(self.emb(ids), keys + queries))


def loss_fn(model, batch):
    ids, keep = batch
    logits = model(ids, keep)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(3):
        keep = torch.ones(4, 6, dtype=torch.bool)
        if step == 1:
            keep[2, :] = False
        batches.append((torch.randint(0, 12, (4, 6), generator=g), keep))
    m = Lm()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
