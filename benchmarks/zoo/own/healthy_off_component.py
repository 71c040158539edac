import math, torch, torch.nn as nn

CASE = dict(
    id="healthy_off_component",
    title=(
        "Mixture likelihood with a switched-off component: log weight -inf and a far point underflow inside "
        "logsumexp"
    ),
    source="tonyduan/mixture-density-network#4; keras-team/keras#2586", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Mixture(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.mu, self.logs, self.logit = nn.Linear(4, k), nn.Linear(4, k), nn.Parameter(torch.zeros(k))

    def forward(self, x, y, active):
        logw = torch.log_softmax(self.logit.masked_fill(~active, -torch.inf), -1)
        logs = self.logs(x).clamp(-4, 4)
        z = (y - self.mu(x)) * torch.exp(-logs)
        comp = -0.5 * z.pow(2) - logs - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(logw + comp, -1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = Mixture(4)
        self.log = []

    def forward(self, x, y, active):
        nll = self.mix(x, y, active)
        with torch.no_grad():
            self.log.append(torch.exp(nll * 30).max().item())   # reported "perplexity", overflows to inf
        return nll.mean()


def loss_fn(model, batch):
    return model(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(8):
        active = torch.tensor([True, True, i > 5, i > 3])
        y = torch.randn(9, 1, generator=g)
        y[3] = 25.0
        batches.append((torch.randn(9, 4, generator=g), y, active))
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-2), batches, loss_fn
