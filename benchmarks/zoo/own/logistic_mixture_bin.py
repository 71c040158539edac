import torch, torch.nn as nn

CASE = dict(
    id="logistic_mixture_bin", title="Discretised logistic likelihood is the log of a difference of two sigmoids: far from the mean both are 1 and the bin has probability 0",
    source="own (discretised likelihoods)", fidelity="analogue",
    precision="fp32", phase="forward", cause="log_of_zero", op=["log"],
    module="", line="torch.log(plus - minus)", fix="Clamp the bin probability at 1e-12, or use the log-space form.",
    recoverable_by=["fix_code", "skip"], step=2, symptom="loss",
)


class PixelNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 2))

    def forward(self, x):
        mean, log_s = self.net(x).chunk(2, -1)
        return {"mean": mean.squeeze(-1), "inv": torch.exp(-log_s.squeeze(-1).clamp(min=-3))}


def nll(out, x):
    plus = torch.sigmoid(out["inv"] * (x - out["mean"] + 1 / 255))
    minus = torch.sigmoid(out["inv"] * (x - out["mean"] - 1 / 255))
    return -torch.log(plus - minus).mean()


def loss_fn(model, batch):
    ctx, x = batch
    return nll(model(ctx), x)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = PixelNet()
    batches = []
    for step in range(4):
        x = torch.rand(6, generator=g) * 2 - 1
        if step == 2:
            x[1] = 60.0  # 8-bit value that was not rescaled
        batches.append((torch.randn(6, 4, generator=g), x))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
