import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="prune_rescale_row",
    title="Pruning rescales each row to its old norm; a row below the threshold is pruned completely: 0 * (norm / 0)",
    source="own", fidelity="adapted",
    precision="fp32", phase="parameter", cause="parameter_corrupted",
    cause_alt=["div_by_zero", "zero_times_inf", "zero_over_zero"], op=["mul", "mul_", "div"],
    module="stem.1", module_alt=[""], line="layer.weight.mul_(before / after)",
    fix="Keep rows that are pruned completely at 0 (clamp the new norm).",
    recoverable_by=["fix_code"], step=3, symptom="loss",
)


@torch.no_grad()
def prune(layer, threshold):
    before = layer.weight.norm(dim=1, keepdim=True)
    layer.weight.masked_fill_(layer.weight.abs() < threshold, 0.0)
    after = layer.weight.norm(dim=1, keepdim=True)
    layer.weight.mul_(before / after)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.ModuleList([nn.Linear(9, 14), nn.Linear(14, 14)])
        self.out = nn.Linear(14, 3)

    def forward(self, x):
        for layer in self.stem:
            x = F.leaky_relu(layer(x))
        return self.out(x)


def loss_fn(model, batch):
    x, y, prune_now = batch
    if prune_now:
        for layer in model.stem:
            prune(layer, 0.03)
    return F.cross_entropy(model(x), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        batches.append((torch.randn(12, 9, generator=g), torch.randint(0, 3, (12,), generator=g), i == 3))
    model = Net()
    with torch.no_grad():
        model.stem[1].weight[6] *= 0.05
    return model, torch.optim.SGD(model.parameters(), 1e-3), batches, loss_fn
