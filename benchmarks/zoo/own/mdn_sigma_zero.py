import math, torch, torch.nn as nn

CASE = dict(
    id="mdn_sigma_zero",
    title=(
        "Mixture density network with sigma = exp(s) and no floor: s reaches -200, sigma is 0 and the "
        "z-score divides by it"
    ),
    source="keras-team/keras#1061, #2586; cpmpercussion/keras-mdn-layer#42", fidelity="direct",
    precision="fp32", phase="forward", phase_alt=["backward"], cause="div_by_zero", cause_alt=["zero_times_inf"],
    op=["div"],
    module="mdn", line="z = (y - mu) / sigma",
    fix="sigma = exp(s) + 1e-6 (or elu(s) + 1 + eps), and evaluate the likelihood in log space.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class MDN(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.pi, self.mu, self.s = nn.Linear(d, k), nn.Linear(d, k), nn.Linear(d, k)

    def forward(self, h, y):
        logpi, mu, s = torch.log_softmax(self.pi(h), -1), self.mu(h), self.s(h)
        sigma = torch.exp(s)
        z = (y - mu) / sigma
        comp = -0.5 * z.pow(2) - s - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(logpi + comp, -1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mdn = nn.Sequential(nn.Linear(3, 12), nn.ReLU()), MDN(12, 4)

    def forward(self, x, y):
        return self.mdn(self.body(x), y).mean()


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(16, 3, generator=g), torch.randn(16, 1, generator=g)) for _ in range(6)]
    m = Net()
    with torch.no_grad():
        m.body[0].weight.abs_()
        m.mdn.s.weight.mul_(0.01)
        m.mdn.s.weight[2] = -1.0
        m.mdn.mu.weight.mul_(0.01)
    batches[3][0][5] = 30.0
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
