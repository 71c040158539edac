import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="mel_log_silence", title="Mel loss of a vocoder takes the log of the mel spectrogram without a floor: a clip with digital silence",
    source="yl4579/StarGANv2-VC#59; csteinmetz1/auraloss#25", fidelity="adapted",
    precision="fp32", phase="forward", cause="log_of_zero", op=["log"],
    module="mel", line="return torch.log(power @ self.bank)",
    fix="torch.log(torch.clamp(mel, min=1e-5)).",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class LogMel(nn.Module):
    def __init__(self, n=32, bands=6):
        super().__init__()
        self.n = n
        self.register_buffer("window", torch.hann_window(n))
        self.register_buffer("bank", torch.rand(n // 2 + 1, bands, generator=torch.Generator().manual_seed(1)))

    def forward(self, wav):
        spec = torch.stft(wav, self.n, hop_length=16, window=self.window, center=False, return_complex=True)
        power = (spec.real.pow(2) + spec.imag.pow(2)).transpose(1, 2)
        return torch.log(power @ self.bank)


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mel = nn.Sequential(nn.Conv1d(1, 8, 7, padding=3), nn.LeakyReLU(0.1), nn.Conv1d(8, 1, 7, padding=3)), LogMel()

    def forward(self, x):
        return self.up(x.unsqueeze(1)).squeeze(1)


def loss_fn(model, batch):
    noisy, wav = batch
    out = model(noisy)
    return F.l1_loss(out, wav) + F.l1_loss(model.mel(out), model.mel(wav))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        wav = torch.randn(3, 128, generator=g) * 0.3
        if i == 3:
            wav[1, 40:] = 0.0
        batches.append((wav + 0.1 * torch.randn(3, 128, generator=g), wav))
    m = Vocoder()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
