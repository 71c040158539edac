import torch, torch.nn as nn

CASE = dict(
    id="cepstrum_log_zero", title="Complex cepstrum features take the log of the complex spectrum: digital silence is log(0)",
    source="own (librosa users' cepstra)", fidelity="analogue",
    precision="fp32", phase="forward", cause="log_of_zero", op=["log"],
    module="", line="torch.log(torch.fft.rfft(wav))", fix="Add an eps to the spectrum before the log.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=1, symptom="loss",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, c):
        return self.net(c)


def cepstrum(wav):
    return torch.fft.irfft(torch.log(torch.fft.rfft(wav)), n=16)[:, :9]


def loss_fn(model, batch):
    wav, y = batch
    return nn.functional.cross_entropy(model(cepstrum(wav)), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(3):
        wav = torch.randn(5, 16, generator=g)
        if step == 1:
            wav[2] = 0.0
        batches.append((wav, torch.randint(0, 3, (5,), generator=g)))
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
