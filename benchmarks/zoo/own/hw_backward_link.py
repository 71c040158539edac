import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="hw_backward_link", title="Pipeline parallel: the gradient that crosses the stage boundary arrives with one exponent of all ones, once; the same step run again is clean",
    source="microsoft/dion#76; pytorch/torchtitan#951", fidelity="adapted",
    precision="fp32", phase="backward", cause="nondeterministic_hardware_fault", op=["view", "bitwise_or", "mul", "mm", "linear", "addmm", "copy", "index_put", "clone", "where", "fill", "select", "slice", "lift_fresh", "gelu", "silu", "silu_backward"],
    module="stages.0", module_alt=["stages.0.act", "stages.0.fc"], line="self.stages[0].register_full_backward_hook(PIPE)",
    fix="Nothing in the code: re-run the step / replace the link. Skip the batch.",
    recoverable_by=["skip"], step=3, symptom="grad", nondeterministic=True,
    crude_disagrees="the corruption is an int-typed bit operation inside a module hook: it has no autograd node of its own",
)


class Pipe:
    def __init__(self):
        self.n, self.at = 0, None

    def __call__(self, mod, grad_in, grad_out):
        self.n += 1
        if self.n != self.at:
            return None
        bits = grad_in[0].clone().view(torch.int32)
        bits[0, 2] = bits[0, 2] | 0x7F800000
        return (bits.view(torch.float32),)


PIPE = Pipe()


class Stage(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc, self.act = nn.Linear(d, d), nn.SiLU()

    def forward(self, x):
        return self.act(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.stages, self.out = nn.Linear(6, 10), nn.ModuleList([Stage(10), Stage(10)]), nn.Linear(10, 3)
        self.stages[0].register_full_backward_hook(PIPE)

    def forward(self, x):
        x = self.inp(x)
        for s in self.stages:
            x = s(x)
        return self.out(x)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    PIPE.n, PIPE.at = 0, 4
    batches = [(torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(6)]
    m = Net()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
