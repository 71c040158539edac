import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="fixed_loss_scale",
    title=(
        "Training script multiplies the loss by a fixed 2^12 and divides the gradients in a hook: the fp16 "
        "layers overflow"
    ),
    source="open-mmlab/mmdetection#3690; NVIDIA/apex#179, #192", fidelity="adapted",
    precision="fp16", phase="backward", cause="loss_scale_overflow", cause_alt=["overflow_fp16"],
    op=["to_copy", "_to_copy", "to", "mm", "linear", "addmm", "mul", "div", "nll_loss", "log_softmax", "mse_loss"],
    module="", line="return F.mse_loss(model(x).float(), y) * LOSS_SCALE",
    fix="Use a dynamic GradScaler, or a scale that the largest gradient survives (2^7).",
    recoverable_by=["fix_code", "fp32", "skip"], step=3, symptom="grad",
)

LOSS_SCALE = 2.0 ** 12


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x):
        return self.net(x)


def loss_fn(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y) * LOSS_SCALE


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(16, 8, generator=g), torch.randn(16, 1, generator=g)) for _ in range(6)]
    batches[3][1][9] = 200.0
    m = Regressor()
    for p in m.parameters():
        p.register_hook(lambda grad: grad / LOSS_SCALE)
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
