import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="mha_weights_empty",
    title="nn.MultiheadAttention with need_weights=True and a key_padding_mask that hides every event of one sample",
    source="pytorch/pytorch#24816, #26098; facebookresearch/Mask2Former#77", fidelity="direct",
    precision="fp32", phase="forward", cause="masked_softmax_all_neg_inf",
    op=["softmax", "multi_head_attention_forward"], module="readers.visits.attn", module_alt=["readers.visits"],
    line="out, weights = self.attn(q, memory, memory, key_padding_mask=pad)",
    fix="Keep at least one position (a learned null event) or drop samples without events.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


class Reader(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 2, d) * 0.2)
        self.attn = nn.MultiheadAttention(d, 2, batch_first=True)

    def forward(self, memory, pad):
        q = self.query.expand(memory.size(0), -1, -1)
        out, weights = self.attn(q, memory, memory, key_padding_mask=pad)
        return out.flatten(1), weights


class Patient(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.ModuleDict({"visits": nn.Linear(5, 8), "labs": nn.Linear(3, 8)})
        self.readers = nn.ModuleDict({"visits": Reader(8), "labs": Reader(8)})
        self.out = nn.Linear(32, 2)

    def forward(self, record):
        parts = []
        for name, reader in self.readers.items():
            events, lengths = record[name]
            pad = torch.arange(events.size(1))[None] >= lengths[:, None]
            summary, _ = reader(self.inp[name](events), pad)
            parts.append(summary)
        return self.out(torch.cat(parts, -1))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["record"]), batch["y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        visits = torch.randint(1, 7, (4,), generator=g)
        if i == 3:
            visits[2] = 0
        record = {
            "labs": (torch.randn(4, 4, 3, generator=g), torch.randint(1, 5, (4,), generator=g)),
            "visits": (torch.randn(4, 6, 5, generator=g), visits),
        }
        batches.append({"record": record, "y": torch.randint(0, 2, (4,), generator=g)})
    model = Patient()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
