import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="ddim_eta_sigma", title="Consistency fine-tuning takes a stochastic DDIM step with eta = 1.5: 1 - abar_prev - sigma^2 is negative and the direction term NaN",
    source="kohya-ss/sd-scripts#934; huggingface/diffusers#5096 (schedule arithmetic outside its domain)", fidelity="adapted",
    precision="bf16", phase="forward", cause="sqrt_of_negative", op=["sqrt"],
    module="sched", line="direction = torch.sqrt(1 - ab_prev - sigma ** 2)",
    fix="eta must lie in [0, 1]; clamp the radicand at 0.",
    recoverable_by=["skip", "fix_code"], step=4, symptom="loss",
)
T = 24


class Scheduler(nn.Module):
    def __init__(self):
        super().__init__()
        beta = torch.linspace(1e-3, 0.3, T)
        self.register_buffer("abar", torch.cumprod(1 - beta, 0))

    def forward(self, x, eps, t, noise, eta):
        ab, ab_prev = self.abar[t][:, None], self.abar[(t - 1).clamp(min=0)][:, None]
        x0 = (x - (1 - ab).sqrt() * eps) / ab.sqrt()
        sigma = eta[:, None] * torch.sqrt((1 - ab_prev) / (1 - ab) * (1 - ab / ab_prev))
        direction = torch.sqrt(1 - ab_prev - sigma ** 2)
        return ab_prev.sqrt() * x0 + direction * eps + sigma * noise


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.temb, self.net = nn.Embedding(T, 8), nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8))
        self.sched = Scheduler()

    def forward(self, x, t):
        return self.net(torch.cat([x, self.temb(t)], -1)).float()


def loss_fn(model, batch):
    x, t, noise, eta, target = batch
    prev = model.sched(x, model(x, t), t, noise, eta)
    return F.huber_loss(prev, target)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        t = torch.randint(8, T - 1, (6,), generator=g)
        eta = torch.rand(6, generator=g) * 0.9
        if i == 4:
            t[2], eta[2] = 2, 1.5
        batches.append((torch.randn(6, 8, generator=g), t, torch.randn(6, 8, generator=g), eta, torch.randn(6, 8, generator=g)))
    m = Student()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
