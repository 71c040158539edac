import torch, torch.nn as nn

CASE = dict(
    id="crf_transitions_empty", title="The CRF layer allocates its transition matrix with empty() and nobody initialises it; it is switched on after a warm-up",
    source="kmkurn/pytorch-crf#1; sauradip/STALE#16", fidelity="direct",
    precision="fp32", phase="parameter", cause="uninitialized_memory", cause_alt=["parameter_corrupted"], op=["add", "logsumexp", "index", "sub"],
    module="tagger.crf", line="self.transitions = nn.Parameter(stale(k, k))",
    fix="Initialise the transitions (uniform(-0.1, 0.1)) in the constructor.",
    recoverable_by=["fix_code"], step=0, loss_step=3, symptom="weight",
)


def stale(*shape):
    """stands for torch.empty(): deterministic garbage with a few NaN bit patterns"""
    n = shape[0] * shape[1]
    bits = torch.arange(n, dtype=torch.int32) * 7919 + 0x3D000000
    bits[5::11] = 0x7FC00000
    return bits.view(torch.float32).view(*shape)


class CRF(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(k))
        self.transitions = nn.Parameter(stale(k, k))

    def forward(self, emit, y):
        b = torch.arange(y.size(0))
        score = self.start[y[:, 0]] + emit[b, 0, y[:, 0]]
        alpha = self.start + emit[:, 0]
        for t in range(1, y.size(1)):
            score = score + self.transitions[y[:, t - 1], y[:, t]] + emit[b, t, y[:, t]]
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transitions, 1) + emit[:, t]
        return (torch.logsumexp(alpha, 1) - score).mean()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc, self.crf = nn.LSTM(8, 12, batch_first=True, bidirectional=True), nn.Linear(24, 5), CRF(5)

    def forward(self, x):
        return self.fc(self.lstm(x)[0])


class NER(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.tagger = nn.Embedding(40, 8), Tagger()


def loss_fn(model, batch):
    ids, y, use_crf = batch
    z = model.tagger(model.emb(ids))
    if use_crf:
        return model.tagger.crf(z, y)
    return nn.functional.cross_entropy(z.flatten(0, 1), y.flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randint(0, 40, (4, 7), generator=g), torch.randint(0, 5, (4, 7), generator=g), i >= 3) for i in range(5)]
    m = NER()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
