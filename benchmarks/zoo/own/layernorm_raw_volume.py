import torch, torch.nn as nn

CASE = dict(
    id="layernorm_raw_volume", title="nn.LayerNorm sees a raw trading volume of 1e30: the square of the deviation leaves float32 inside the kernel",
    source="own (unscaled tabular features)", fidelity="analogue",
    precision="fp32", phase="forward", cause="overflow_any_precision", op=["native_layer_norm", "layer_norm"],
    module="norm", line="self.norm(x)", fix="Scale or take the log of the feature before the network.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=2, symptom="loss",
)


class Tab(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x):
        h = self.norm(x)
        return self.net(h)


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.huber_loss(model(x).squeeze(-1), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for step in range(4):
        x = torch.rand(8, 6, generator=g)
        if step == 2:
            x[5, 0] = 1e30
        batches.append((x, torch.rand(8, generator=g)))
    m = Tab()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
