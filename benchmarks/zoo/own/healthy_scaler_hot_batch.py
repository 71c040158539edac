import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="healthy_scaler_hot_batch",
    title="GradScaler meets one batch with large targets: the scaled fp16 gradients overflow, the step is skipped once",
    source="NVIDIA/apex#289; NoamRosenberg/autodeeplab#12 (is this normal? yes)", fidelity="control",
    precision="fp16", phase="none", cause="none", cause_alt=["loss_scale_overflow"], op=[], module="", line="",
    fix="nothing to fix", recoverable_by=[], step=None, loop="scaler",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 2))

    def forward(self, x):
        return self.net(x)


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=1000)


def loss_fn(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 8, generator=g), torch.randn(8, 2, generator=g)) for _ in range(9)]
    batches[3] = (batches[3][0], batches[3][1] * 400.0)
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
