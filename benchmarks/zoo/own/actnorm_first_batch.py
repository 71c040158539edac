import torch, torch.nn as nn, math

CASE = dict(
    id="actnorm_first_batch", title="ActNorm initialises its scale from the first batch: a channel that is constant there gets log(1 / 0) = inf as parameter",
    source="vislearn/FrEIA#121; y0ast/Glow-PyTorch#1", fidelity="direct",
    precision="fp32", phase="parameter", phase_alt=["forward"], cause="parameter_corrupted", cause_alt=["log_of_zero", "div_by_zero"], op=["log", "reciprocal", "div", "copy"],
    module="flow.1.act", line="self.log_s.copy_(-torch.log(x.std(0)))",
    fix="Add eps to the standard deviation (or dither constant channels) before the initialisation.",
    recoverable_by=["fix_code", "fix_data"], step=0, symptom="loss",
)


class ActNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.mu, self.log_s = nn.Parameter(torch.zeros(c)), nn.Parameter(torch.zeros(c))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.mu.copy_(x.mean(0))
                self.log_s.copy_(-torch.log(x.std(0)))
                self.ready.fill_(True)
        return (x - self.mu) * self.log_s.exp(), self.log_s.sum()


class Step(nn.Module):
    def __init__(self, c, act):
        super().__init__()
        self.act = ActNorm(c) if act else None
        self.net = nn.Sequential(nn.Linear(c // 2, 16), nn.ReLU(), nn.Linear(16, c // 2))

    def forward(self, x):
        ld = 0.0
        if self.act is not None:
            x, ld = self.act(x)
        a, b = x.chunk(2, -1)
        return torch.cat([b + self.net(a), a], -1), ld


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.flow = nn.ModuleList([Step(4, False), Step(4, True)])

    def forward(self, x):
        tot = 0.0
        for s in self.flow:
            x, ld = s(x)
            tot = tot + ld
        return x, tot


def loss_fn(model, batch):
    z, ld = model(batch)
    return (0.5 * z.pow(2).sum(-1) + 2 * math.log(2 * math.pi)).mean() - ld


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randn(16, 4, generator=g) for _ in range(4)]
    batches[0][:, 0] = 0.5  # the first file has a dead sensor
    m = Flow()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
