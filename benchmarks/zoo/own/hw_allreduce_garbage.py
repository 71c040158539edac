import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="hw_allreduce_garbage",
    title="One gradient bucket comes back corrupted from the all-reduce, once; a second run of the step is finite",
    source="pytorch/torchtitan#951; microsoft/dion#76", fidelity="adapted",
    precision="fp16", phase="backward", cause="nondeterministic_hardware_fault",
    op=["mul", "add", "clone", "copy", "index_put", "fill", "select", "view", "bitwise_or", "mm", "addmm", "linear",
        "to_copy", "_to_copy", "to", "slice", "lift_fresh"],
    module="body.fc2", line="RING_HOP",
    fix="Nothing in the code: run the step again, exclude the node.",
    recoverable_by=["skip"], step=2, symptom="grad", nondeterministic=True,
)


class Ring:
    """stands for the collective: averages over one rank, and fails a single time"""

    def __init__(self):
        self.calls = 0
        self.broken = None
        self.garbage = torch.tensor(0x7F800000, dtype=torch.int32).view(torch.float32)

    def reduce(self, grad):
        self.calls += 1
        grad = grad / 1
        if self.calls == self.broken:
            grad[3:5] = RING_HOP.garbage
        return grad


RING_HOP = Ring()


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 16)

    def forward(self, x):
        return F.relu(self.fc2(F.relu(self.fc1(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        return self.out(self.body(x))


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).float(), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    RING_HOP.calls = 0
    RING_HOP.broken = 3
    batches = [(torch.randn(8, 8, generator=g), torch.randint(0, 2, (8,), generator=g)) for _ in range(4)]
    model = Net()
    for name, p in model.named_parameters():
        if name == "body.fc2.weight":
            p.register_hook(RING_HOP.reduce)
    return model, torch.optim.SGD(model.parameters(), 0.05), batches, loss_fn
