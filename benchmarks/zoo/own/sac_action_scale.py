import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="sac_action_scale",
    title="SAC: the tanh correction is taken of the already rescaled action, 1 - (2 a)^2 is negative and its log NaN",
    source="philtabor/Actor-Critic-Methods-Paper-To-Code#7; cpnota/autonomous-learning-library#139",
    fidelity="direct",
    precision="fp32",
    phase="forward",
    cause="log_of_negative",
    op=["log"],
    module="actor.squash",
    line="correction = torch.log(1 - action.pow(2) + 1e-6)",
    fix="Use tanh(u) before the scaling by max_action in the correction.",
    recoverable_by=["skip", "fix_code"],
    step=3,
    symptom="loss",
    seeds=[0],
)


class Squash(nn.Module):
    def __init__(self, max_action):
        super().__init__()
        self.max_action = max_action

    def forward(self, u, logp):
        action = torch.tanh(u) * self.max_action
        correction = torch.log(1 - action.pow(2) + 1e-6)
        return action, (logp - correction).sum(-1)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 16)
        self.mu = nn.Linear(16, 2)
        self.log_std = nn.Linear(16, 2)
        self.squash = Squash(2.0)

    def forward(self, obs, noise):
        h = F.relu(self.net(obs))
        std = self.log_std(h).clamp(-5, -2).exp()
        return self.squash(self.mu(h) + std * noise, -0.5 * noise.pow(2) - std.log())


class SAC(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = Actor()
        self.critic = nn.Linear(8, 1)


def loss_fn(model, batch):
    obs, noise = batch
    action, logp = model.actor(obs, noise)
    return (0.2 * logp - model.critic(torch.cat([obs, action], -1)).squeeze(-1)).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(0.3 * torch.randn(8, 6, generator=g), torch.randn(8, 2, generator=g)) for _ in range(5)]
    m = SAC()
    with torch.no_grad():
        m.actor.mu.weight.mul_(0.2)
        m.actor.mu.bias.zero_()
    batches[3][0][4] *= 150.0
    return m, torch.optim.Adam(m.parameters(), 1e-4), batches, loss_fn
