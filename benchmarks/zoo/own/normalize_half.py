import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="normalize_half",
    title="F.normalize in half precision: its eps of 1e-12 is 0 in fp16, a dead feature row is 0 / 0",
    source="pytorch/pytorch#41527; deepspeedai/DeepSpeed#581 (eps lost in half)",
    fidelity="adapted",
    precision="fp16",
    phase="forward",
    cause="eps_underflow",
    cause_alt=["zero_over_zero", "division_by_near_zero_norm"],
    op=["div"],
    module="student.project",
    line="return F.normalize(F.relu(self.fc(x)), dim=-1)",
    fix="F.normalize(x.float()) or eps=1e-4.",
    recoverable_by=["skip", "fp32", "fix_code"],
    step=3,
    symptom="loss",
)


class Project(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 6)

    def forward(self, x):
        return F.normalize(F.relu(self.fc(x)), dim=-1)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, 12), nn.ReLU())
        self.project = Project()

    def forward(self, x):
        return self.project(self.stem(x))


class Distill(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Student()


def loss_fn(model, batch):
    x, teacher = batch
    return (1 - (model.student(x).float() * teacher).sum(-1)).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(5):
        batches.append((torch.randn(6, 5, generator=g), F.normalize(torch.rand(6, 6, generator=g), dim=-1)))
    m = Distill()
    with torch.no_grad():
        m.student.stem[0].weight[0] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
        m.student.stem[0].bias[0] = -5.0
        m.student.project.fc.weight[:, 0] = -4.0
        m.student.project.fc.bias.fill_(0.5)
    batches[3][0][2, 0] = 40.0
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
