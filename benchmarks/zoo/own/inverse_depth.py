import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="inverse_depth",
    title="Stereo head turns depth into disparity with 1 / depth: a dead ReLU gives depth 0 and the disparity is inf",
    source="own (inverse depth); compare Zzh-tju/DIoU-pytorch-detectron#19",
    fidelity="adapted",
    precision="bf16",
    phase="forward",
    cause="div_by_zero",
    op=["div", "reciprocal"],
    module="heads.1.to_disparity",
    line="return self.focal / depth",
    fix="depth.clamp(min=1e-3), or predict the disparity directly.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=4,
    symptom="loss",
)


class ToDisparity(nn.Module):
    def __init__(self, focal):
        super().__init__()
        self.focal = focal

    def forward(self, depth):
        return self.focal / depth


class Head(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.conv = nn.Conv2d(6, 1, 1)
        self.to_disparity = ToDisparity(2.0)
        nn.init.constant_(self.conv.bias, bias)

    def forward(self, f):
        return self.to_disparity(F.relu(self.conv(f)))


class Stereo(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Tanh())
        self.heads = nn.ModuleList([Head(8.0), Head(4.0)])

    def forward(self, pair):
        f = self.body(pair)
        return [head(f).float() for head in self.heads]


def loss_fn(model, batch):
    pair, disparity = batch
    return sum((d - disparity).abs().mean() for d in model(pair))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(2, 2, 6, 6, generator=g), torch.rand(2, 1, 6, 6, generator=g)) for _ in range(6)]
    m = Stereo()
    with torch.no_grad():
        m.body[0].weight[0] = 0.0
        m.body[0].weight[0, 0, 1, 1] = 1.0
        m.heads[1].conv.weight.mul_(0.1)
        m.heads[1].conv.weight[0, 0] = -4.5
    for pair, _ in batches:
        pair[:, 0].clamp_(max=0.8)
    batches[4][0][1, 0, 2, 3] = 60.0  # a hot pixel
    return m, torch.optim.SGD(m.parameters(), 1e-4), batches, loss_fn
