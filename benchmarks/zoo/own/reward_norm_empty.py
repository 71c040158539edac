import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="reward_norm_empty",
    title=(
        "Running return statistics take the mean over finished episodes; in one rollout none finished and "
        "the buffer is NaN"
    ),
    source="unslothai/unsloth-zoo#1286; strands-labs/robots#2429; Unity-Technologies/ml-agents#4299",
    fidelity="adapted",
    precision="fp32", phase="buffer", cause="buffer_corrupted", cause_alt=["zero_over_zero"], op=["mean"],
    module="critic.norm", line="mu = ret[done].mean()",
    fix="Skip the update of the statistics when no episode has finished.",
    recoverable_by=["fix_code"], step=3, loss_step=4, symptom="buffer",
)


class ReturnNorm(nn.Module):
    def __init__(self, rho=0.9):
        super().__init__()
        self.rho = rho
        self.register_buffer("centre", torch.zeros(()))

    def forward(self, ret, done):
        out = ret - self.centre
        with torch.no_grad():
            mu = ret[done].mean()
            self.centre.mul_(self.rho).add_(mu, alpha=1 - self.rho)
        return out


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)), ReturnNorm()

    def forward(self, obs, ret, done):
        return self.body(obs).squeeze(-1), self.norm(ret, done)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = Critic()

    def forward(self, *a):
        return self.critic(*a)


def loss_fn(model, batch):
    v, target = model(*batch)
    return F.mse_loss(v, target)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        done = torch.rand(12, generator=g) > 0.6
        done[0] = True
        if i == 3:
            done[:] = False
        batches.append((torch.randn(12, 5, generator=g), torch.randn(12, generator=g) + 3, done))
    m = Agent()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
