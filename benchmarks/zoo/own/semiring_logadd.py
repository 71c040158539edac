import torch, torch.nn as nn

CASE = dict(
    id="semiring_logadd", title="Transducer lattice: hand-written logaddexp max + log1p(exp(-|a - b|)) of two forbidden arcs is -inf - (-inf)",
    source="pytorch/pytorch#31829; tinygrad/tinygrad#17853", fidelity="adapted",
    precision="fp32", phase="forward", cause="inf_minus_inf", op=["sub"],
    module="joint.lattice", line="gap = (a - b).abs()",
    fix="torch.logaddexp, or a large negative finite score for forbidden arcs.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)
NEG = float("-inf")


def log_add(a, b):
    gap = (a - b).abs()
    return torch.maximum(a, b) + torch.log1p(torch.exp(-gap))


class Lattice(nn.Module):
    def forward(self, emit, stay, ok):
        emit, stay = emit.masked_fill(~ok, NEG), stay.masked_fill(~ok, NEG)
        a = torch.zeros(emit.size(0))
        for t in range(emit.size(1)):
            a = log_add(a + emit[:, t], a + stay[:, t])
        return a


class Joint(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.lattice = nn.Linear(8, 2), Lattice()

    def forward(self, h, ok):
        e, s = self.fc(h).log_softmax(-1).unbind(-1)
        return self.lattice(e, s, ok)


class RNNT(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.joint = nn.GRU(4, 8, batch_first=True), Joint()


def loss_fn(model, batch):
    x, ok, w = batch
    h, _ = model.enc(x)
    return -(model.joint(h, ok) * w).mean() + 1e-3 * h.pow(2).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        ok = torch.ones(5, 9, dtype=torch.bool)
        if i == 3:
            ok[2, 6] = False  # the alignment restriction forbids both arcs of one frame
        batches.append((torch.randn(5, 9, 4, generator=g), ok, torch.rand(5, generator=g)))
    m = RNNT()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
