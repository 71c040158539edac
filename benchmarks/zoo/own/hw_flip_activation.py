import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="hw_flip_activation",
    title=(
        "A single bit flip in an activation on its way to the next device, once; running the same step again "
        "is clean"
    ),
    source="AlexeyAB/darknet#5547 (hardware bug); microsoft/dion#76; mrphys/tensorflow-nufft#20", fidelity="adapted",
    precision="fp32", phase="forward", cause="nondeterministic_hardware_fault",
    op=["where", "view", "copy", "clone", "fill", "lift_fresh", "gelu", "addmm", "linear"],
    module="stages.1", module_alt=["stages.1.lin", "stages.2", "stages.2.lin"],
    line="return torch.where(self.hit, torch.tensor(0x7F800000, dtype=torch.int32).view(torch.float32), out)",
    fix="Nothing in the code: run the step again, check the device and the cable.",
    recoverable_by=["skip"], step=4, symptom="loss", nondeterministic=True,
)


class FlakyBus:
    def __init__(self):
        self.count = 0
        self.bad = None
        self.hit = torch.zeros(6, 10, dtype=torch.bool)
        self.hit[2, 5] = True

    def __call__(self, module, args, out):
        self.count += 1
        if self.count != self.bad:
            return None
        return torch.where(self.hit, torch.tensor(0x7F800000, dtype=torch.int32).view(torch.float32), out)


BUS = FlakyBus()


class Stage(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)

    def forward(self, x):
        return F.gelu(self.lin(x))


class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Stage(10), Stage(10), Stage(10)])
        self.out = nn.Linear(10, 3)
        self.stages[1].register_forward_hook(BUS)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.out(x)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    BUS.count = 0
    BUS.bad = 5
    batches = []
    for _ in range(6):
        batches.append({"x": torch.randn(6, 10, generator=g), "y": torch.randint(0, 3, (6,), generator=g)})
    model = Pipeline()
    return model, torch.optim.RMSprop(model.parameters(), 1e-3), batches, loss_fn
