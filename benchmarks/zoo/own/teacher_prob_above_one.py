import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="teacher_prob_above_one",
    title=(
        "Bernoulli KL against teacher probabilities: averaging rounded ensembles gives a target of 1.004, "
        "log(1 - t) is NaN"
    ),
    source="own", fidelity="adapted",
    precision="fp32", phase="forward", phase_alt=["data"], cause="label_out_of_domain", cause_alt=["log_of_negative"],
    op=["log"], module="", line="neg = (1 - t) * (torch.log(1 - t) - F.logsigmoid(-z))",
    fix="Clamp the teacher probabilities to (0, 1).",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.tags = nn.Linear(8, 6)

    def forward(self, x):
        return self.tags(self.features(x))


def bernoulli_kl(z, t):
    pos = t * (torch.log(t) - F.logsigmoid(z))
    neg = (1 - t) * (torch.log(1 - t) - F.logsigmoid(-z))
    return (pos + neg).mean()


def loss_fn(model, batch):
    wave, teacher = batch
    return bernoulli_kl(model(wave), teacher)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(5):
        batches.append((torch.randn(5, 2, 20, generator=g), torch.rand(5, 6, generator=g) * 0.9 + 0.05))
    batches[3][1][2, 4] = 1.004  # sum of rounded ensemble weights is not 1
    model = Student()
    return model, torch.optim.RMSprop(model.parameters(), 1e-3), batches, loss_fn
