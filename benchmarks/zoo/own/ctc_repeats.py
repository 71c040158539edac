import torch
import torch.nn as nn

CASE = dict(
    id="ctc_repeats",
    title="CTC line recogniser: the label fits the frames, but repeated characters need blanks and no path is left",
    source="githubharald/SimpleHTR#28; pytorch/pytorch#31557; SeanNaren/warp-ctc#29",
    fidelity="direct",
    precision="bf16",
    phase="forward",
    cause="ctc_inf",
    op=["ctc_loss"],
    module="criterion",
    module_alt=[""],
    line="return model.criterion(logp.float(), labels, frames, lengths)",
    fix="Require frames >= length + number of repeats, or zero_infinity=True.",
    recoverable_by=["skip", "fix_data", "fix_code"],
    step=3,
    symptom="loss",
)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv1d(6, 12, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2))
        self.out = nn.Linear(12, 9)
        self.criterion = nn.CTCLoss(blank=0)

    def forward(self, columns):
        h = self.cnn(columns).permute(2, 0, 1)
        return self.out(h).log_softmax(-1)


def loss_fn(model, batch):
    columns, labels, lengths = batch
    logp = model(columns)
    frames = torch.full((columns.size(0),), logp.size(0), dtype=torch.long)
    return model.criterion(logp.float(), labels, frames, lengths)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        labels = torch.stack([torch.randperm(8, generator=g)[:6] + 1 for _ in range(3)])
        if i == 3:
            labels[1] = 4  # a dashed line: ------
        batches.append((torch.randn(3, 6, 20, generator=g), labels, torch.tensor([6, 6, 5])))
    m = Recogniser()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
