import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="mha_all_padding",
    title="nn.MultiheadAttention that returns its weights: key_padding_mask hides the whole memory of one sample",
    source="pytorch/pytorch#41508, #160064",
    fidelity="direct",
    precision="fp32",
    phase="forward",
    cause="masked_softmax_all_neg_inf",
    op=["softmax"],
    module="fusion.layers.1.cross",
    module_alt=["fusion.layers.1"],
    line="mixed, weights = self.cross(text, audio, audio, key_padding_mask=silent)",
    fix="Leave one (dummy) key visible for samples without audio.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class FusionLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.cross = nn.MultiheadAttention(d, 2, batch_first=True)
        self.norm = nn.LayerNorm(d)

    def forward(self, text, audio, silent):
        mixed, weights = self.cross(text, audio, audio, key_padding_mask=silent)
        return self.norm(text + mixed), weights


class SelfLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, text, audio, silent):
        return text + self.mlp(text), None


class Fusion(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.words = nn.Embedding(30, d)
        self.sound = nn.Linear(5, d)
        self.layers = nn.ModuleList([SelfLayer(d), FusionLayer(d)])

    def forward(self, ids, audio, silent):
        text = self.words(ids)
        sound = self.sound(audio)
        maps = []
        for layer in self.layers:
            text, weights = layer(text, sound, silent)
            maps.append(weights)
        return text.mean(1), maps


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fusion = Fusion()
        self.head = nn.Linear(12, 3)


def loss_fn(model, batch):
    pooled, _ = model.fusion(batch["ids"], batch["audio"], batch["silent"])
    return F.cross_entropy(model.head(pooled), batch["mood"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        silent = torch.rand(4, 6, generator=g) > 0.6
        silent[:, 0] = i == 3
        if i == 3:
            silent[2] = True
            silent[[0, 1, 3], 1] = False
        batches.append({
            "ids": torch.randint(0, 30, (4, 5), generator=g),
            "audio": torch.randn(4, 6, 5, generator=g),
            "silent": silent,
            "mood": torch.randint(0, 3, (4,), generator=g),
        })
    m = Model()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
