import torch, torch.nn as nn

CASE = dict(
    id="renorm_running_std", title="Batch renormalisation divides by a running deviation whose buffer starts with zeros",
    source="own (BatchRenorm re-implementations)", fidelity="analogue",
    precision="fp32", phase="forward", cause="div_by_zero", op=["div"],
    module="body.1", line="r = std.detach() / self.running_std", fix="Start the running deviation with ones.",
    recoverable_by=["fix_code"], step=0, symptom="loss",
)


class BatchRenorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c))
        self.register_buffer("running_mean", torch.zeros(c))
        self.register_buffer("running_std", torch.zeros(c))

    def forward(self, x):
        mean, std = x.mean(0), x.std(0, unbiased=False) + 1e-3
        r = std.detach() / self.running_std
        d = (mean.detach() - self.running_mean) / (self.running_std + 1e-3)
        self.running_std += 0.1 * (std.detach() - self.running_std)
        self.running_mean += 0.1 * (mean.detach() - self.running_mean)
        return ((x - mean) / std * r + d) * self.weight


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), BatchRenorm(6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x):
        return self.body(x)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(8, 4, generator=g), torch.randn(8, 2, generator=g)) for _ in range(3)]
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
