import torch, torch.nn as nn

CASE = dict(
    id="gelu_cube_half", title="Hand-written tanh GELU cubes half-precision activations: 42 cubed is beyond 65504",
    source="own (hand-written GELU in half precision)", fidelity="analogue",
    precision="fp16", phase="forward", cause="overflow_fp16", op=["pow", "mul"],
    module="act", line="0.044715 * x ** 3", fix="F.gelu(x, approximate='tanh'), which computes in fp32.",
    recoverable_by=["fix_code", "fp32", "skip"], step=1, symptom="loss", symptom_alt=["grad"],
)


class Gelu(nn.Module):
    def forward(self, x):
        inner = 0.7978845608 * (x + 0.044715 * x ** 3)
        return 0.5 * x * (1 + inner - inner.tanh())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 8), Gelu(), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x).float().squeeze(-1), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    with torch.no_grad():
        m.a.weight.fill_(1.0)
    batches = []
    for step in range(3):
        x = torch.randn(6, 4, generator=g)
        if step == 1:
            x[5] = 30.0
        batches.append((x, torch.randn(6, generator=g)))
    return m, torch.optim.SGD(m.parameters(), 1e-4), batches, loss_fn
