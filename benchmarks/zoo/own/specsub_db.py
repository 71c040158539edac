import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="specsub_db",
    title=(
        "Spectral subtraction before the dB conversion: the estimated noise floor exceeds a bin, log10 of a "
        "negative power"
    ),
    source="KimythAnly/AGAIN-VC#5; csteinmetz1/auraloss#63", fidelity="adapted",
    precision="fp32", phase="forward", cause="log_of_negative", op=["log10", "log"],
    module="frontend.db", line="return 10 * torch.log10(power)",
    fix="Clamp the cleaned power at a floor such as 1e-10 before the logarithm.",
    recoverable_by=["skip", "fix_code"], step=4, symptom="loss",
)


class ToDb(nn.Module):
    def forward(self, power):
        return 10 * torch.log10(power)


class Frontend(nn.Module):
    def __init__(self, bins):
        super().__init__()
        self.floor, self.db = nn.Parameter(torch.full((bins,), 0.01)), ToDb()

    def forward(self, power):
        return self.db(power - self.floor)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend, self.conv, self.out = Frontend(12), nn.Conv1d(12, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, power):
        z = self.frontend(power).transpose(1, 2)
        return self.out(F.relu(self.conv(z / 20)).mean(-1))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        power = torch.rand(6, 15, 12, generator=g) * 3 + 0.5
        if i == 4:
            power[2, 7:, 9] = 1e-4       # the codec removed the upper band
        batches.append((power, torch.randint(0, 4, (6,), generator=g)))
    m = Tagger()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
