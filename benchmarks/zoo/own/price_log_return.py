import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="price_log_return",
    title="A halted share has price 0, its log return is -inf in the features; the first LayerNorm turns it into NaN",
    source="microsoft/finnts#108 (log of invalid regressors)", fidelity="adapted",
    precision="bf16", phase="data", cause="input_nonfinite", cause_alt=["log_of_zero"],
    op=["layer_norm", "native_layer_norm"], module="backbone.norm_in",
    line="ret = torch.log(prices[:, 1:] / prices[:, :-1])",
    fix="Drop halted days (or clip the price) before taking the logarithm.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


class Backbone(nn.Module):
    def __init__(self, window, d):
        super().__init__()
        self.norm_in = nn.LayerNorm(window)
        self.mix = nn.Linear(window, d)

    def forward(self, x):
        return F.silu(self.mix(self.norm_in(x)))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone(10, 24)
        self.heads = nn.ModuleList([nn.Linear(24, 1), nn.Linear(24, 1)])

    def forward(self, x):
        h = self.backbone(x)
        return torch.cat([head(h) for head in self.heads], -1)


def pinball(pred, y):
    err = y - pred
    q = torch.tensor([0.1, 0.9])
    return torch.maximum(q * err, (q - 1) * err).mean()


def loss_fn(model, batch):
    x, y = batch
    return pinball(model(x).float(), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        prices = torch.rand(8, 12, generator=g) + 20.0
        if i == 3:
            prices[5, 10] = 0.0
        ret = torch.log(prices[:, 1:] / prices[:, :-1])
        target = torch.randn(8, 1, generator=g) * 0.01
        batches.append((ret[:, :10], target))
    model = Forecaster()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
