import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="absmax_token_scale", title="1-bit layer quantises activations per token by 127 / absmax: a token whose hidden state is all zeros gets an infinite scale",
    source="microsoft/BitNet#123; ml-explore/mlx#1028", fidelity="direct",
    precision="fp32", phase="forward", cause="div_by_zero", op=["div", "reciprocal"],
    module="layers.1", line="scale = 127.0 / x.abs().amax(-1, keepdim=True)", fix="Clamp the maximum at 1e-5.",
    recoverable_by=["fix_code", "skip"], step=1, symptom="loss",
)


class BitLinear(nn.Linear):
    def forward(self, x):
        scale = 127.0 / x.abs().amax(-1, keepdim=True)
        q = (x * scale).round().clamp(-128, 127) / scale
        x = x + (q - x).detach()
        w = self.weight
        s = w.abs().mean()
        w = w + ((w / s).round().clamp(-1, 1) * s - w).detach()
        return F.linear(x, w, self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 8), BitLinear(8, 8), BitLinear(8, 3)])

    def forward(self, x):
        x = F.relu(self.layers[0](x))
        return self.layers[2](F.silu(self.layers[1](x)) + 0.1)


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    with torch.no_grad():
        m.layers[0].weight.abs_()
        m.layers[0].bias.fill_(0.1)
    batches = []
    for step in range(3):
        x = torch.rand(4, 6, 5, generator=g)
        if step == 1:
            x[2, 3] = -3.0
        batches.append((x, torch.randint(0, 3, (4, 6), generator=g)))
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
