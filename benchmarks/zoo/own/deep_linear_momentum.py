import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="deep_linear_momentum",
    title=(
        "A deep MLP without normalisation, momentum 0.9 and lr 0.05: weights and activations grow until they "
        "overflow"
    ),
    source="lxtGH/DecoupleSegNets#19; cszn/DnCNN#73 (loss inf with SGD)", fidelity="adapted",
    precision="fp32", phase="forward", phase_alt=["backward"], cause="gradient_explosion",
    cause_alt=["overflow_any_precision"],
    op=["addmm", "mm", "linear", "mul", "mse_loss", "relu", "leaky_relu", "add"],
    module="tower.fc5", module_alt=[f"tower.fc{i}" for i in range(12)] + ["tower", ""],
    line="x = F.leaky_relu(layer(x), 0.2)",
    fix="Lower the learning rate, clip the gradient norm, normalise the activations.",
    recoverable_by=["clip", "lower_lr", "fix_code"], step=6, symptom="loss", seeds=[0],
)


class Tower(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        for i in range(depth):
            self.add_module(f"fc{i}", nn.Linear(d, d))

    def forward(self, x):
        for layer in self.children():
            x = F.leaky_relu(layer(x), 0.2)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Tower(16, 12)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.tower(x)).squeeze(-1)


def loss_fn(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(16, 16, generator=g), torch.randn(16, generator=g) * 3) for _ in range(25)]
    model = Net()
    for layer in model.tower.children():
        nn.init.kaiming_normal_(layer.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches, loss_fn
