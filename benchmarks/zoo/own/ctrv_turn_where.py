import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="ctrv_turn_where",
    title="Constant-turn-rate motion model: torch.where hides the 0 / 0 of driving straight, its gradient is NaN",
    source="jax-ml/jax#1722 (sinc, double where); oarriaga/paz#383; pypose/bae#41",
    fidelity="adapted",
    precision="fp32",
    phase="backward",
    phase_alt=["forward"],
    cause="zero_times_inf",
    cause_alt=["zero_over_zero"],
    op=["div", "mul"],
    module="tracker.motion",
    line="arc = torch.sin(0.5 * turn) / (0.5 * turn)",
    fix="Replace the turn rate by 1 where it is 0 before the division as well (double where).",
    recoverable_by=["skip", "fix_code"],
    step=3,
    symptom="grad",
)


class TurnRateMotion(nn.Module):
    def forward(self, state, speed, turn):
        arc = torch.sin(0.5 * turn) / (0.5 * turn)
        arc = torch.where(turn.abs() < 1e-6, torch.ones_like(arc), arc)
        heading = state[:, 2] + 0.5 * turn
        x = state[:, 0] + speed * arc * torch.cos(heading)
        y = state[:, 1] + speed * arc * torch.sin(heading)
        return torch.stack([x, y, state[:, 2] + turn], -1)


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.speed = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Softplus())
        self.turn = nn.Linear(4, 1, bias=False)
        self.motion = TurnRateMotion()

    def forward(self, state, cue):
        return self.motion(state, self.speed(cue).squeeze(-1), self.turn(cue).squeeze(-1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tracker = Tracker()


def loss_fn(model, batch):
    state, cue, after = batch
    return F.huber_loss(model.tracker(state, cue), after)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        cue = torch.randn(6, 4, generator=g)
        if i == 3:
            cue[4] = 0.0  # parked car: no cue at all
        batches.append((torch.randn(6, 3, generator=g), cue, torch.randn(6, 3, generator=g)))
    m = Model()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
