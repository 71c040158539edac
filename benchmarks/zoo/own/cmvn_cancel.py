import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="cmvn_cancel",
    title="Utterance normalisation with sqrt(E[x^2] - E[x]^2): a constant channel cancels to a negative variance",
    source="xinjli/allosaurus#64; Tencent/ncnn#874; megvii-research/TLC#3",
    fidelity="direct",
    precision="fp32",
    phase="forward",
    cause="sqrt_of_negative",
    op=["sqrt"],
    module="front.cmvn",
    line="std = (second - mean * mean).sqrt()",
    fix="Clamp the variance at 0 (or use torch.var, which does not cancel) and add an eps.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class CMVN(nn.Module):
    def forward(self, feats):
        mean = feats.mean(1, keepdim=True)
        second = (feats * feats).mean(1, keepdim=True)
        std = (second - mean * mean).sqrt()
        return (feats - mean) / (std + 1e-3)


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.cmvn = CMVN()
        self.proj = nn.Linear(6, 12)

    def forward(self, feats):
        return F.gelu(self.proj(self.cmvn(feats)))


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = Front()
        self.rnn = nn.GRU(12, 12, batch_first=True)
        self.out = nn.Linear(12, 5)

    def forward(self, feats):
        return self.out(self.rnn(self.front(feats))[1][0])


def loss_fn(model, batch):
    feats, lang = batch
    return F.cross_entropy(model(feats), lang)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        feats = torch.randn(4, 15, 6, generator=g) + 3.0
        if i == 3:
            feats[2, :, 0:4] = torch.tensor([-11.51, -7.3, -9.7, -13.1])  # digital silence: the log floor
        batches.append((feats, torch.randint(0, 5, (4,), generator=g)))
    m = Speech()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
