import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="static_scale_128k", title="The loss is multiplied by a static 131072 for fp16 and the learning rate divided by it: a batch with a large error overflows the half gradients",
    source="NVIDIA/DALI#1377; NVIDIA/apex#240", fidelity="adapted",
    precision="fp16", phase="backward", cause="loss_scale_overflow", cause_alt=["overflow_fp16"], op=["to_copy", "_to_copy", "to", "mm", "linear", "addmm", "mul", "div", "convolution"],
    module="", line="return loss * SCALE",
    fix="Use a dynamic scaler (GradScaler) or a smaller static scale.",
    recoverable_by=["skip", "fp32", "lower_scale", "fix_code"], step=4, symptom="grad",
    crude_disagrees="the overflow happens in a cast / matmul of the backward pass, the blame lies on the fixed scale",
)
SCALE = 2.0 ** 17


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(c), nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.relu(self.bn(x)))


class PreAct(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(Block(8), Block(8)), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def loss_fn(model, batch):
    x, y = batch
    loss = F.mse_loss(model(x).float(), y)
    return loss * SCALE


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 3, 8, 8, generator=g), torch.randn(8, 2, generator=g) * 0.3) for _ in range(6)]
    batches[4][1][3] = 25.0
    m = PreAct()
    return m, torch.optim.SGD(m.parameters(), 1e-3 / SCALE), batches, loss_fn
