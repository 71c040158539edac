import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="crf_partition_underflow",
    title="CRF normaliser as log(sum(exp(.))): all path scores are below -104, every exp underflows, log(0) = -inf",
    source="tfzhou/ContrastiveSeg#68; HobbitLong/SupContrast#104 (log of a sum of underflowed exponentials)",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="log_of_zero",
    op=["log"],
    module="crf",
    line="alpha = torch.log(torch.exp(paths).sum(dim=1)) + emit[:, t]",
    fix="Use torch.logsumexp.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.trans = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def partition(self, emit):
        opening = torch.arange(emit.size(2)) > 0
        alpha = emit[:, 0].masked_fill(~opening, float("-inf"))  # tag 0 may not open a sentence: a legal -inf
        for t in range(1, emit.size(1)):
            paths = alpha.unsqueeze(2) + self.trans
            alpha = torch.log(torch.exp(paths).sum(dim=1)) + emit[:, t]
        return torch.logsumexp(alpha, -1)

    def forward(self, emit, tags):
        score = emit.gather(2, tags.unsqueeze(-1)).sum((1, 2)) + self.trans[tags[:, :-1], tags[:, 1:]].sum(1)
        return (self.partition(emit) - score).mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.emit = nn.Linear(8, 4)
        self.crf = CRF(4)

    def forward(self, ids, tags, shift):
        return self.crf(F.logsigmoid(self.emit(self.embed(ids))) - shift.view(-1, 1, 1), tags)


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        tags = torch.randint(1, 4, (5, 6), generator=g)
        shift = torch.rand(5, generator=g)
        if i == 3:
            shift[2] = 60.0
        batches.append((torch.randint(0, 30, (5, 6), generator=g), tags, shift))
    m = Tagger()
    return m, torch.optim.Adam(m.parameters(), 1e-2), batches, loss_fn
