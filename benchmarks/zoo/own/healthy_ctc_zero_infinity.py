import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="healthy_ctc_zero_infinity",
    title="CTC with zero_infinity=True: one transcript is too long for its audio, its loss and gradient are set to 0",
    source="pytorch/pytorch#14401 (the documented option)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 12, batch_first=True, bidirectional=True)
        self.out = nn.Linear(24, 7)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h).log_softmax(-1)


def loss_fn(model, batch):
    logp = model(batch["audio"]).transpose(0, 1)
    return F.ctc_loss(logp, batch["text"], batch["frames"], batch["letters"], zero_infinity=True)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(8):
        frames = torch.tensor([14, 12, 10])
        if i % 3 == 2:
            frames[1] = 3
        batches.append({
            "audio": torch.randn(3, 14, 5, generator=g), "text": torch.randint(1, 7, (3, 5), generator=g),
            "frames": frames, "letters": torch.tensor([5, 5, 4]),
        })
    model = Recognizer()
    return model, torch.optim.Adam(model.parameters(), 1e-2), batches, loss_fn
