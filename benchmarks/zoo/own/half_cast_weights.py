import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="half_cast_weights",
    title="A wrapper halves every float of the batch: an inverse-frequency weight above 65504 turns to inf",
    source="facebookresearch/fairseq#4555 (fp16 targets and weights); own",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="overflow_fp16",
    op=["to_copy", "_to_copy", "to", "half", "copy_"],
    module="",
    line="return value.half() if value.is_floating_point() else value",
    fix="Do not cast targets and weights to half (or normalise the weights first).",
    recoverable_by=["skip", "fp32", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
    recover_note="the cast is explicit: the fp32 remedy means no .half() on the batch",
)


def to_half(value):
    if isinstance(value, dict):
        return {k: to_half(v) for k, v in value.items()}
    return value.half() if value.is_floating_point() else value


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.cats = nn.ModuleList([nn.Embedding(5, 4), nn.Embedding(7, 4)])
        self.body = nn.Sequential(nn.Linear(6 + 8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, num, cat):
        codes = [table(cat[:, i]) for i, table in enumerate(self.cats)]
        return self.body(torch.cat([num.float(), *codes], 1)).squeeze(1)


def loss_fn(model, batch):
    batch = to_half(batch)
    inputs = batch["inputs"]
    err = F.smooth_l1_loss(model(inputs["num"], inputs["cat"]), batch["target"].float(), reduction="none")
    weight = batch["weight"].float()
    return (err * weight).sum() / weight.sum()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        weight = torch.rand(10, generator=g) * 1000 + 1
        if i == 3:
            weight[6] = 1.3e5
        cat = torch.stack([torch.randint(0, 5, (10,), generator=g), torch.randint(0, 7, (10,), generator=g)], 1)
        inputs = {"num": torch.randn(10, 6, generator=g), "cat": cat}
        batches.append({"inputs": inputs, "target": torch.randn(10, generator=g), "weight": weight})
    m = Tabular()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
