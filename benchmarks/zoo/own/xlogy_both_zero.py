import torch, torch.nn as nn

CASE = dict(
    id="xlogy_both_zero", title="KL written with torch.xlogy, safe in the forward pass: where target and prediction are both exactly 0 the derivative by the prediction is 0 / 0",
    source="own (torch.xlogy in divergences)", fidelity="analogue",
    precision="fp32", phase="backward", cause="zero_over_zero", cause_alt=["log_of_zero"], op=["xlogy", "special_xlogy"],
    module="", line="torch.xlogy(t, p)", fix="Clamp the prediction away from 0.",
    recoverable_by=["fix_code", "skip"], step=2, symptom="grad",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 10), nn.Linear(10, 4)

    def forward(self, x):
        return torch.softmax(self.b(torch.tanh(self.a(x))) * x[:, :1].abs(), -1)


def kl(p, t):
    return (torch.xlogy(t, t) - torch.xlogy(t, p)).sum(-1).mean()


def loss_fn(model, batch):
    x, t = batch
    return kl(model(x), t)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = []
    for step in range(4):
        x = torch.randn(6, 5, generator=g)
        t = torch.softmax(torch.randn(6, 4, generator=g), -1)
        if step == 2:
            x[3, 0] = 1e4
            with torch.no_grad():
                t[3] = (m(x)[3] > 0.5).float()
        batches.append((x, t))
    return m, torch.optim.SGD(m.parameters(), 1e-4), batches, loss_fn
