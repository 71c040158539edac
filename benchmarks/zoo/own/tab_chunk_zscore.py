import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="tab_chunk_zscore",
    title=(
        "Numeric columns are standardised per chunk while collating; a column that is constant in one chunk "
        "gives 0 / 0"
    ),
    source="fastai/fastai#889; mllam/neural-lam#136; deeplearning4j/deeplearning4j#1646", fidelity="direct",
    precision="fp32", phase="data", cause="input_nonfinite", cause_alt=["zero_over_zero"],
    op=["linear", "addmm", "mm"], module="encoders.num.0",
    line='num = (rows["num"] - rows["num"].mean(0)) / rows["num"].std(0)',
    fix="Use statistics of the whole training set with a floor on the standard deviation.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=4, symptom="loss",
)


class TabNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoders = nn.ModuleDict({
            "num": nn.Sequential(nn.Linear(5, 12), nn.GELU()),
            "cat": nn.Embedding(9, 12),
        })
        self.head = nn.Linear(24, 2)

    def forward(self, feats):
        parts = [self.encoders["num"](feats["num"]), self.encoders["cat"](feats["cat"])]
        return self.head(torch.cat(parts, -1))


def collate(rows):
    num = (rows["num"] - rows["num"].mean(0)) / rows["num"].std(0)
    return {"feats": {"num": num, "cat": rows["cat"]}, "label": rows["label"]}


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["feats"]), batch["label"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    chunks = []
    for i in range(6):
        rows = {
            "num": torch.randn(16, 5, generator=g) * 3 + 2,
            "cat": torch.randint(0, 9, (16,), generator=g),
            "label": torch.randint(0, 2, (16,), generator=g),
        }
        if i == 4:
            rows["num"][:, 3] = 0.0  # a dry month: no rain at all
        chunks.append(rows)
    model = TabNet()
    return model, torch.optim.AdamW(model.parameters(), 1e-3), [collate(c) for c in chunks], loss_fn
