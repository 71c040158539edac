import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="silent_clip_peak",
    title="Waveforms are divided by their peak in the dataset; one completely silent clip among many becomes NaN",
    source="bshall/hifigan#4; yxlu-0102/MP-SENet#33; rwth-i6/returnn#459", fidelity="direct",
    precision="fp16", phase="data", cause="input_nonfinite", cause_alt=["zero_over_zero"],
    op=["convolution", "conv1d", "mkldnn_convolution"], module="frontend.layers.0.conv",
    line="wav = wav / wav.abs().max()", fix="Divide by max(peak, 1e-3), or leave silent clips out.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=5, symptom="loss",
)


class ConvBlock(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv = nn.Conv1d(i, o, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(2, o)

    def forward(self, x):
        return F.gelu(self.norm(self.conv(x)))


class Frontend(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(ConvBlock(1, 8), ConvBlock(8, 8))

    def forward(self, x):
        return self.layers(x).mean(-1)


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = Frontend()
        self.out = nn.Linear(8, 4)

    def forward(self, wav):
        return self.out(self.frontend(wav))


class Clips:
    def __init__(self, g, n):
        self.wavs = list(torch.randn(n, 1, 64, generator=g) * 0.2)
        self.who = torch.randint(0, 4, (n,), generator=g)
        self.wavs[44] = torch.zeros(1, 64)

    def __getitem__(self, i):
        wav = self.wavs[i]
        wav = wav / wav.abs().max()
        return wav, self.who[i]


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["wav"]).float(), batch["who"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    clips = Clips(g, 56)
    batches = []
    for start in range(0, 56, 8):
        wavs, who = zip(*[clips[i] for i in range(start, start + 8)], strict=True)
        batches.append({"wav": torch.stack(wavs), "who": torch.stack(who)})
    model = Speaker()
    return model, torch.optim.SGD(model.parameters(), 0.01), batches, loss_fn
