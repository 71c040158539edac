from dataclasses import dataclass

import torch
import torch.nn as nn

CASE = dict(
    id="ppo_ratio_min",
    title="PPO: exp(logp - old_logp) is inf for one stale action; torch.min drops it, backward multiplies 0 by inf",
    source="OpenRLHF/OpenRLHF#1293; radixark/miles#1363; THUDM/slime#2198",
    fidelity="direct",
    precision="fp32",
    phase="backward",
    phase_alt=["forward"],
    cause="zero_times_inf",
    cause_alt=["exp_overflow"],
    op=["exp", "mul"],
    module="",
    line="ratio = torch.exp(logp - rollout.old_logp)",
    fix="Clamp the log-ratio (e.g. to [-20, 20]) before the exponential.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="grad",
)


@dataclass
class Rollout:
    obs: torch.Tensor
    act: torch.Tensor
    old_logp: torch.Tensor
    adv: torch.Tensor


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.mean = nn.Linear(16, 2)
        self.log_std = nn.Parameter(torch.zeros(2))

    def log_prob(self, obs, act):
        z = (act - self.mean(self.torso(obs))) / self.log_std.exp()
        return -(0.5 * z.pow(2) + self.log_std + 0.92).sum(-1)


def loss_fn(model, rollout):
    logp = model.log_prob(rollout.obs, rollout.act)
    ratio = torch.exp(logp - rollout.old_logp)
    gain = ratio * rollout.adv
    clipped = ratio.clamp(0.8, 1.2) * rollout.adv
    return -torch.min(gain, clipped).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Actor()
    batches = []
    for i in range(5):
        obs = torch.randn(8, 5, generator=g)
        act = torch.randn(8, 2, generator=g)
        with torch.no_grad():
            old = m.log_prob(obs, act) + 0.05 * torch.randn(8, generator=g)
        adv = torch.randn(8, generator=g)
        if i == 3:
            old[2] = -140.0  # a very old sample from the replay of another policy
            adv[2] = 0.7
        batches.append(Rollout(obs, act, old, adv))
    return m, torch.optim.Adam(m.parameters(), 3e-4), batches, loss_fn
