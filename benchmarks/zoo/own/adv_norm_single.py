import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="adv_norm_single",
    title="PPO normalises advantages per minibatch; the last minibatch of the rollout holds a single transition",
    source="DLR-RM/stable-baselines3#325, #1028; jolibrain/wheatley#93", fidelity="direct",
    precision="fp32", phase="forward", cause="std_of_single_element", op=["std", "std_mean", "var"],
    module="", line="adv = (adv - adv.mean()) / (adv.std() + 1e-8)",
    fix="Normalise only when the minibatch has more than one transition (or over the whole rollout).",
    recoverable_by=["skip", "fix_code", "fix_data"], step=5, symptom="loss",
)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.pi, self.v = nn.Linear(5, 24), nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, o):
        h = torch.tanh(self.shared(o))
        return F.log_softmax(self.pi(h), -1), self.v(h).squeeze(-1)


def loss_fn(model, batch):
    obs, act, old_logp, adv, ret = batch
    logp, v = model(obs)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    ratio = (logp.gather(1, act[:, None]).squeeze(1) - old_logp).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.min(ratio * adv, clipped * adv).mean() + 0.5 * F.mse_loss(v, ret)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    n = 41
    obs, act = torch.randn(n, 5, generator=g), torch.randint(0, 3, (n,), generator=g)
    adv, ret = torch.randn(n, generator=g), torch.randn(n, generator=g)
    old = torch.full((n,), -1.1)
    batches = [tuple(t[i:i + 8] for t in (obs, act, old, adv, ret)) for i in range(0, n, 8)]
    m = ActorCritic()
    return m, torch.optim.Adam(m.parameters(), 3e-4), batches, loss_fn
