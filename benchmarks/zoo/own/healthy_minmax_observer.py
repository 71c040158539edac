import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="healthy_minmax_observer", title="Quantisation observers start with min = inf and max = -inf buffers; a branch that is first used at step 4 keeps them until then",
    source="pytorch/pytorch MinMaxObserver (initial state)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[], step=None,
)


class Observe(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("lo", torch.tensor(float("inf")))
        self.register_buffer("hi", torch.tensor(float("-inf")))

    def forward(self, x):
        with torch.no_grad():
            self.lo.copy_(torch.minimum(self.lo, x.min()))
            self.hi.copy_(torch.maximum(self.hi, x.max()))
            step = (self.hi - self.lo).clamp(min=1e-6) / 255
            q = torch.round((x - self.lo) / step) * step + self.lo
        return x + (q - x).detach()


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.obs = nn.Linear(6, 8), Observe()

    def forward(self, x):
        return self.obs(F.relu(self.fc(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = Branch(), Branch(), nn.Linear(8, 2)

    def forward(self, x, both):
        h = self.a(x)
        if both:
            h = h + self.b(x)
        return self.out(h)


def loss_fn(model, batch):
    x, y, both = batch
    return F.cross_entropy(model(x, both), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 6, generator=g), torch.randint(0, 2, (8,), generator=g), i >= 4) for i in range(8)]
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
