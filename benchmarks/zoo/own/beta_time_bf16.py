import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="beta_time_bf16",
    title=(
        "Flow-matching time is a ratio of two powered uniforms in bf16; when both draws are 0 the Beta "
        "sample is 0 / 0"
    ),
    source="huggingface/lerobot#1096; stan-dev/math#419", fidelity="direct",
    precision="bf16", phase="forward", cause="zero_over_zero", op=["div"],
    module="action_expert", line="t = g1 / (g1 + g2)",
    fix="Sample Beta(alpha, beta) in float32 with a rejection of zeros (torch.distributions.Beta).",
    recoverable_by=["skip", "fp32", "fix_code"], step=4, symptom="loss",
)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(4 + 1 + 6, 32), nn.Linear(32, 4)

    def sample_time(self, u):
        g1, g2 = u[:, :1].pow(1 / 1.5), u[:, 1:].pow(1 / 1.0)
        t = g1 / (g1 + g2)
        return 0.999 * t + 0.001

    def forward(self, act, obs, noise, u):
        t = self.sample_time(u)
        xt = (1 - t) * noise + t * act
        v = self.out(F.silu(self.inp(torch.cat([xt, t, obs], 1))))
        return v, act - noise


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.action_expert = Expert()

    def forward(self, *a):
        return self.action_expert(*a)


def loss_fn(model, batch):
    v, target = model(*batch)
    return F.mse_loss(v.float(), target.float())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        u = (torch.rand(8, 2, generator=g) * 0.99 + 0.01).bfloat16()
        if i == 4:
            u[3] = 0.0                   # bf16 uniforms have 256 levels, both hit the lowest one
        act, obs, noise = (torch.randn(8, d, generator=g).bfloat16() for d in (4, 6, 4))
        batches.append((act, obs, noise, u))
    m = Policy()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
