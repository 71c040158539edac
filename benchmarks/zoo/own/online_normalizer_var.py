import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="online_normalizer_var",
    title=(
        "Per-scene normaliser computes E[x^2] - E[x]^2 from running sums; in a static scene rounding makes "
        "it negative"
    ),
    source="google-deepmind/deepmind-research#346", fidelity="direct",
    precision="fp32", phase="forward", phase_alt=["buffer"], cause="sqrt_of_negative", cause_alt=["buffer_corrupted"],
    op=["sqrt"], module="model.node_norm", line="std = torch.sqrt(self.acc_sq / self.n - mean ** 2)",
    fix="Clamp the variance at 0 (or accumulate with Welford's update).",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Normalizer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.register_buffer("acc", torch.zeros(d))
        self.register_buffer("acc_sq", torch.zeros(d))
        self.register_buffer("n", torch.zeros(()))

    def reset(self):
        for buf in self.buffers():
            buf.zero_()

    def forward(self, x):
        with torch.no_grad():
            self.acc += x.sum(0)
            self.acc_sq += x.pow(2).sum(0)
            self.n += x.size(0)
        mean = self.acc / self.n
        std = torch.sqrt(self.acc_sq / self.n - mean ** 2)
        return (x - mean) / (std + 0.1)


class Mesh(nn.Module):
    def __init__(self, nodes):
        super().__init__()
        self.node_norm = Normalizer(nodes)
        self.net = nn.Sequential(nn.Linear(nodes, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.net(self.node_norm(x))


class Simulator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Mesh(64)


def loss_fn(model, batch):
    model.model.node_norm.reset()
    loss = 0.0
    for frames, accel in zip(batch["frames"], batch["accel"], strict=True):
        loss = loss + F.mse_loss(model.model(frames), accel)
    return loss / len(batch["frames"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        room = 273.15 + 40 * torch.rand(64, generator=g)  # temperature of each node in kelvin
        noise = 0.0 if i == 3 else 3.0
        frames = [room + noise * torch.randn(20, 64, generator=g) for _ in range(3)]
        batches.append({"frames": frames, "accel": [torch.randn(20, 2, generator=g) for _ in range(3)]})
    model = Simulator()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
