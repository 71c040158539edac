import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="ckpt_average_half",
    title=(
        "Checkpoint averaging adds the fp16 weights before dividing: an outlier position row sums to inf and "
        "is loaded"
    ),
    source="ultralytics/ultralytics#24731 (fp16 cast poisons fp32 weights); facebookresearch/fairseq#1079",
    fidelity="adapted",
    precision="bf16", phase="parameter", cause="parameter_corrupted", cause_alt=["overflow_fp16"],
    op=["embedding"], module="enc.pos", line="total[key] = total[key] + value.half()",
    fix="Average in fp32 (or divide before adding).",
    recoverable_by=["fix_code", "fix_data"], step=0, loss_step=3, symptom="weight",
)


class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(20, 12)
        self.pos = nn.Embedding(16, 12)
        self.ff = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        return self.ff(x)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = Enc()
        self.out = nn.Linear(12, 5)

    def forward(self, ids):
        return self.out(self.enc(ids))


def average(checkpoints):
    total = {}
    for ckpt in checkpoints:
        for key, value in ckpt.items():
            total.setdefault(key, torch.zeros_like(value).half())
            total[key] = total[key] + value.half()
    return {key: value.float() / len(checkpoints) for key, value in total.items()}


def loss_fn(model, batch):
    ids, tags = batch
    return F.cross_entropy(model(ids).flatten(0, 1).float(), tags.flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        n = 16 if i == 3 else 10
        batches.append((torch.randint(0, 20, (4, n), generator=g), torch.randint(0, 5, (4, n), generator=g)))
    model = Tagger()
    saved = []
    for _ in range(5):
        state = {k: v.clone() for k, v in model.state_dict().items()}
        state["enc.pos.weight"][15, 3] = 20000.0
        saved.append(state)
    model.load_state_dict(average(saved))
    return model, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0), batches, loss_fn
