import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="axis_angle_rest",
    title=(
        "Axis-angle to quaternion takes sqrt of the squared angle and selects by where: a joint in rest "
        "pose has angle 0"
    ),
    source="kornia/kornia#3949, #3980", fidelity="direct",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", cause_alt=["zero_times_inf"], op=["sqrt"],
    module="body.to_quat", line="theta = torch.sqrt(sq)",
    fix="Take the root of where(sq > 0, sq, 1) (double where) so that it never sees 0.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class ToQuat(nn.Module):
    def forward(self, aa):
        sq = (aa * aa).sum(-1, keepdim=True)
        theta = torch.sqrt(sq)
        safe = torch.where(sq > 0, theta, torch.ones_like(theta))
        k = torch.where(sq > 0, torch.sin(theta / 2) / safe, torch.full_like(theta, 0.5))
        return torch.cat([torch.cos(theta / 2), k * aa], -1)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.pose, self.to_quat = nn.Embedding(12, 9), ToQuat()

    def forward(self, frame):
        return self.to_quat(self.pose(frame).view(-1, 3, 3))


class Fitter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = Body(), nn.Parameter(torch.ones(4))

    def forward(self, frame):
        return self.body(frame) * self.scale


def loss_fn(model, batch):
    frame, quat = batch
    return F.mse_loss(model(frame), quat)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        frame = torch.randint(0, 11, (4,), generator=g)
        if i == 3:
            frame[2] = 11
        batches.append((frame, F.normalize(torch.randn(4, 3, 4, generator=g), dim=-1)))
    m = Fitter()
    with torch.no_grad():
        m.body.pose.weight[11, 3:6] = 0.0        # the calibration frame: elbow in rest pose
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
