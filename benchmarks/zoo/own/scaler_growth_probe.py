import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="scaler_growth_probe",
    title=(
        "GradScaler doubles the scale after every step and probes the limit: the scaled fp16 gradients "
        "overflow, it backs off"
    ),
    source="NVIDIA/tacotron2#112; facebookresearch/fairseq#515 (overflow detected, setting loss scale)",
    fidelity="adapted",
    precision="fp16", phase="backward", cause="loss_scale_overflow", cause_alt=["overflow_fp16"],
    op=["to_copy", "_to_copy", "to", "mm", "addmm", "linear", "mul", "native_layer_norm", "layer_norm", "nll_loss",
        "log_softmax", "cross_entropy_loss", "div"],
    module="head", module_alt=["", "layers.1", "layers.0", "layers"], line="",
    fix="Nothing: the scaler skips the step and halves its scale (a longer growth_interval makes it rarer).",
    recoverable_by=["skip"], step=6, symptom="grad", loop="scaler",
)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(15, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 6)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(x)


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=1)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1).float(), batch["tags"].flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(8):
        ids = torch.randint(0, 15, (4, 6), generator=g)
        batches.append({"ids": ids, "tags": torch.randint(0, 6, (4, 6), generator=g)})
    model = Tagger()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
