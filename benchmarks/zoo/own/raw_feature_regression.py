import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="raw_feature_regression",
    title=(
        "Linear regression on raw ages and incomes with lr 0.005: every step overshoots further until "
        "float32 overflows"
    ),
    source="pytorch/pytorch#149827, #23142; krshrimali/Linear-Regression-using-PyTorch-CPP#11", fidelity="direct",
    precision="fp32", phase="forward", phase_alt=["backward", "optimizer"], cause="gradient_explosion",
    cause_alt=["overflow_any_precision"], op=["mse_loss", "pow", "mean", "mul", "addmm", "mm", "linear", "sub"],
    module="", module_alt=["reg.lin"], line="return F.mse_loss(model(age), spend)",
    fix="Standardise the features (or lower the learning rate by orders of magnitude).",
    recoverable_by=["clip", "lower_lr", "fix_data", "fix_code"], step=9, symptom="loss", seeds=[0],
)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 1)

    def forward(self, x):
        return self.lin(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.reg = Regression()

    def forward(self, x):
        return self.reg(x)


def loss_fn(model, batch):
    age, spend = batch
    return F.mse_loss(model(age), spend)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(30):
        age = torch.randint(60, 100, (8, 1), generator=g).float()
        rooms = torch.randint(1, 5, (8, 1), generator=g).float()
        batches.append((torch.cat([age, rooms], 1), age * 10 - 450 + rooms))
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.005), batches, loss_fn
