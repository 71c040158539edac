import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="event_gap_log", title="The collate function stores log(time since last event); two events in the same second give -inf in the batch",
    source="awslabs/gluonts#833; flashlight/flashlight#505 (-inf features)", fidelity="adapted",
    precision="fp32", phase="data", cause="input_nonfinite", cause_alt=["log_of_zero"], op=["linear", "addmm", "mm", "cat", "log"],
    module="", line="return torch.log(gaps)",
    fix="log1p, or a floor of one second.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


def log_gap(t):
    gaps = t[:, 1:] - t[:, :-1]
    return torch.log(gaps)


class Hawkes(nn.Module):
    def __init__(self):
        super().__init__()
        self.mark, self.inp = nn.Embedding(6, 4), nn.Linear(5, 12)
        self.rnn, self.out = nn.GRU(12, 12, batch_first=True), nn.Linear(12, 6)

    def forward(self, mark, gap):
        x = torch.cat([self.mark(mark), gap.unsqueeze(-1)], -1)
        h, _ = self.rnn(self.inp(x))
        return self.out(h)


def loss_fn(model, batch):
    mark, gap = batch
    z = model(mark[:, :-1], gap)
    return F.cross_entropy(z.flatten(0, 1), mark[:, 1:].flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        t = torch.cumsum(torch.randint(1, 50, (4, 9), generator=g).float(), 1)
        if i == 3:
            t[1, 5:] -= t[1, 5].item() - t[1, 4].item()
        batches.append((torch.randint(0, 6, (4, 9), generator=g), log_gap(t)))
    m = Hawkes()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
