import torch, torch.nn as nn

CASE = dict(
    id="learned_exponent_sign", title="Learned exponent that starts at exactly 2: x ** p is finite for negative x, its derivative by p is the log of a negative number",
    source="tensorflow/tfjs#346; pytorch/pytorch#76483", fidelity="direct",
    precision="fp32", phase="backward", cause="pow_negative_base", cause_alt=["log_of_negative"], op=["pow"],
    module="act", line="x ** self.p", fix="Take the power of the absolute value, or clamp the base.",
    recoverable_by=["fix_code"], step=0, symptom="grad",
)


class PowerAct(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x):
        return x ** self.p


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 8)
        self.act = PowerAct()
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


def loss_fn(model, batch):
    x, y = batch
    return (model(x).squeeze(-1) - y).abs().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(12, 5, generator=g), torch.randn(12, generator=g)) for _ in range(3)]
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
