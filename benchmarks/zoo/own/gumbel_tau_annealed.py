import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="gumbel_tau_annealed", title="Temperature of gumbel_softmax is annealed linearly to 0: the last epoch divides by 0",
    source="pytorch/pytorch#184031", fidelity="direct",
    precision="fp32", phase="forward", cause="div_by_zero", op=["div"],
    module="vq", line="F.gumbel_softmax(self.proj(h), tau=tau", fix="Anneal to a positive floor such as 0.1.",
    recoverable_by=["fix_code", "skip"], step=4, symptom="loss",
)


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.code = nn.Linear(6, 5), nn.Linear(5, 6, bias=False)

    def forward(self, h, tau):
        one_hot = F.gumbel_softmax(self.proj(h), tau=tau, hard=True)
        return self.code(one_hot)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.vq, self.dec = nn.Linear(4, 6), Quantizer(), nn.Linear(6, 4)

    def forward(self, x, tau):
        return self.dec(self.vq(torch.tanh(self.enc(x)), tau))


def loss_fn(model, batch):
    x, tau = batch
    return F.mse_loss(model(x, tau), x)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(6, 4, generator=g), 1.0 - step / 4) for step in range(5)]
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
