import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="fbank_single_frame",
    title="Speech recognition: per-utterance mean/variance normalisation of an utterance with a single frame",
    source="facebookresearch/fairseq#1863; digantamisra98/EvoNorm#4",
    fidelity="direct",
    precision="fp32",
    phase="forward",
    cause="std_of_single_element",
    op=["std", "var", "std_mean", "var_mean"],
    module="frontend.normalise",
    line="return (utt - utt.mean(dim=0)) / (utt.std(dim=0) + 1e-5)",
    fix="Use unbiased=False (or drop utterances with one frame).",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=2,
    symptom="loss",
)


class Normalise(nn.Module):
    def forward(self, utt):
        return (utt - utt.mean(dim=0)) / (utt.std(dim=0) + 1e-5)


class Frontend(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalise = Normalise()
        self.proj = nn.Linear(8, 12)

    def forward(self, utterances):
        rows = [self.proj(self.normalise(u)) for u in utterances]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = Frontend()
        self.rnn = nn.LSTM(12, 10, batch_first=True)
        self.out = nn.Linear(10, 4)

    def forward(self, utterances):
        return self.out(self.rnn(self.frontend(utterances))[1][0][-1])


def loss_fn(model, batch):
    return F.cross_entropy(model([item["fbank"] for item in batch]), torch.stack([item["word"] for item in batch]))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        frames = torch.randint(4, 9, (5,), generator=g).tolist()
        if i == 2:
            frames[3] = 1
        words = torch.randint(0, 4, (5,), generator=g)
        batches.append([{"fbank": torch.randn(frames[k], 8, generator=g), "word": words[k]} for k in range(5)])
    m = Keyword()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
