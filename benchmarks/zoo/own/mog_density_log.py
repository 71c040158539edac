import torch, torch.nn as nn, torch.nn.functional as F, math

CASE = dict(
    id="mog_density_log", title="Handwriting mixture density: the log of a sum of Gaussian densities; a pen jump far from every mean underflows to log(0)",
    source="keras-team/keras#1061, #2586; tonyduan/mixture-density-network#4", fidelity="direct",
    precision="bf16", phase="forward", cause="log_of_zero", op=["log"],
    module="head", line="return -torch.log((pi * dens).sum(-1))",
    fix="logsumexp over log pi + log N.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class MixtureHead(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.k, self.fc = k, nn.Linear(d, 3 * k)

    def forward(self, h, y):
        a, mu, s = self.fc(h).float().chunk(3, -1)
        pi, sigma = a.softmax(-1), F.softplus(s) + 0.1
        dens = torch.exp(-0.5 * ((y - mu) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        return -torch.log((pi * dens).sum(-1))


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 16, batch_first=True), MixtureHead(16, 5)

    def forward(self, x):
        h, _ = self.rnn(x[:, :-1])
        return self.head(h, x[:, 1:])


def loss_fn(model, batch):
    return model(batch).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randn(4, 12, 1, generator=g) * 0.5 for _ in range(5)]
    batches[3][2, 8] = 25.0
    m = Writer()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
