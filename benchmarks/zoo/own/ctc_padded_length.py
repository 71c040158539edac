import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="ctc_padded_length", title="CTC target lengths are taken from the padded tensor, not from the transcripts: the longest transcript of a batch makes a short utterance impossible",
    source="pytorch/pytorch#14401; wenet-e2e/wenet#2299", fidelity="adapted",
    precision="bf16", phase="forward", cause="ctc_inf", op=["ctc_loss"],
    module="criterion", line="return self.criterion(logp, tgt, in_len, tgt_len)",
    fix="Pass the true transcript lengths.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(6, 16, 3, 2, 1), nn.ReLU(), nn.Conv1d(16, 16, 3, 2, 1), nn.ReLU())
        self.out, self.criterion = nn.Linear(16, 9), nn.CTCLoss(blank=0)

    def forward(self, x):
        return self.out(self.enc(x.transpose(1, 2)).transpose(1, 2))

    def loss(self, x, frames, tgt):
        logp = self(x).float().log_softmax(-1).transpose(0, 1)
        in_len = (frames + 3) // 4
        tgt_len = torch.full((tgt.size(0),), tgt.size(1))
        return self.criterion(logp, tgt, in_len, tgt_len)


def loss_fn(model, batch):
    return model.loss(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        words = 9 if i == 3 else 4
        frames = torch.tensor([60, 52, 24])
        start = torch.randint(0, 8, (3, 1), generator=g)
        tgt = (start + torch.arange(words)[None]) % 8 + 1
        batches.append((torch.randn(3, 60, 6, generator=g), frames, tgt))
    m = Recognizer()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
