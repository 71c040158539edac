import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="euler_pitch_asin",
    title="Pitch angle as asin(2 (w y - z x)) of a quaternion that was never normalised: the argument leaves [-1, 1]",
    source="kornia/kornia#3949 (rotation conversions); facebookresearch/momentum#589", fidelity="adapted",
    precision="fp32", phase="forward", cause="acos_asin_domain", op=["asin", "arcsin"],
    module="imu.euler", line="pitch = torch.asin(2 * (w * y - z * x))",
    fix="Normalise the quaternion first and clamp the argument to [-1, 1].",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class ToEuler(nn.Module):
    def forward(self, q):
        w, x, y, z = q.unbind(-1)
        roll = torch.atan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y))
        pitch = torch.asin(2 * (w * y - z * x))
        yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
        return torch.stack([roll, pitch, yaw], -1)


class IMU(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.quat, self.euler = nn.LSTM(6, 16, batch_first=True), nn.Linear(16, 4), ToEuler()

    def forward(self, seq):
        h = self.rnn(seq)[0][:, -1]
        return self.euler(self.quat(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.imu = IMU()

    def forward(self, seq):
        return self.imu(seq)


def loss_fn(model, batch):
    return F.smooth_l1_loss(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(6, 5, 6, generator=g) * 0.05, torch.randn(6, 3, generator=g) * 0.3) for _ in range(6)]
    m = Net()
    with torch.no_grad():
        m.imu.quat.bias.copy_(torch.tensor([0.6, 0.0, 0.1, 0.0]))
        m.imu.quat.weight[2, 0] = 2.5
        m.imu.rnn.weight_ih_l0[[0, 32, 48]] = 1.0
    batches[3][0][1] = 4.0               # the sensor was dropped
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
