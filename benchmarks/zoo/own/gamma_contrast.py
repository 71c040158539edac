import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="gamma_contrast", title="Differentiable gamma augmentation is applied after z-scoring: negative intensities to the power 0.8",
    source="kornia/kornia#2377; TorchIO-project/torchio#368", fidelity="adapted",
    precision="fp32", phase="forward", cause="pow_negative_base", op=["pow"],
    module="aug.gamma", line="return x.pow(self.gamma)",
    fix="Rescale to [0, 1] before the power (retain_stats), or apply it before normalisation.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class Gamma(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.tensor(0.8))

    def forward(self, x):
        return x.pow(self.gamma)


class Aug(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma, self.gain = Gamma(), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.gain * self.gamma(x)


class SegNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.aug, self.down, self.up = Aug(), nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.gn = nn.GroupNorm(4, 8)

    def forward(self, x):
        return self.up(F.relu(self.gn(self.down(self.aug(x)))))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(2, 1, 8, 8, generator=g) + 0.05, torch.randint(0, 2, (2, 8, 8), generator=g)) for _ in range(5)]
    x = batches[3][0]
    batches[3] = ((x - x.mean()) / x.std(), batches[3][1])  # this case comes from the pre-normalised site
    m = SegNet()
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
