import torch, torch.nn as nn

CASE = dict(
    id="healthy_viterbi_ban",
    title=(
        "Structured hinge loss by max-sum decoding: banned transitions are -inf, log(0) of the start prior "
        "is -inf, both legal"
    ),
    source="deepmodeling/deepmd-kit#5715; THUwangcy/ReChorus#8", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class MaxSum(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k, self.trans = k, nn.Parameter(torch.zeros(k, k))

    def forward(self, emit):
        ban = torch.zeros(self.k, self.k)
        ban[0, 2] = -torch.inf
        ban[2, 1] = -torch.inf
        start = torch.log(torch.tensor([1.0] + [0.0] * (self.k - 1)))
        best = start + emit[:, 0]
        for t in range(1, emit.size(1)):
            best = (best[:, :, None] + self.trans + ban).amax(1) + emit[:, t]
        return best.amax(-1)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emit, self.dec = nn.Linear(6, 3), MaxSum(3)

    def forward(self, x):
        e = self.emit(x)
        return self.dec(e), e


def loss_fn(model, batch):
    x, tags = batch
    best, emit = model(x)
    gold = emit.gather(2, tags[:, :, None]).sum((1, 2))
    return torch.relu(1 + best - gold).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(8):
        tags = torch.randint(0, 2, (5, 7), generator=g)
        tags[:, 0] = 0
        batches.append((torch.randn(5, 7, 6, generator=g), tags))
    m = Tagger()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
