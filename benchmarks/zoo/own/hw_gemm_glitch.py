import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="hw_gemm_glitch", title="A marginal accelerator returns one wrong element of a matrix product, once; the same step run again is clean",
    source="pytorch/torchtitan#951; microsoft/dion#76", fidelity="adapted",
    precision="bf16", phase="forward", cause="nondeterministic_hardware_fault", op=["view", "bitwise_or", "linear", "mm", "addmm", "copy", "index_put", "clone", "to_copy", "_to_copy", "fill", "select", "slice", "lift_fresh"],
    module="mlp.fc2", module_alt=["mlp"], line="self.fc2.register_forward_hook(ALU)",
    fix="Nothing in the code: re-run the step / replace the device. Skip the batch.",
    recoverable_by=["skip"], step=4, symptom="loss", nondeterministic=True,
    crude_disagrees="the corruption is an int-typed bit operation inside a forward hook",
)


class ALU_:
    def __init__(self):
        self.n, self.at = 0, None

    def __call__(self, mod, args, out):
        self.n += 1
        if self.n != self.at:
            return None
        bits = out.detach().float().clone().view(torch.int32)
        bits[2, 1] = bits[2, 1] | 0x7F800000
        return out + (bits.view(torch.float32).to(out.dtype) - out.detach())


ALU = ALU_()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 8)
        self.fc2.register_forward_hook(ALU)

    def forward(self, x):
        return F.gelu(self.fc2(F.gelu(self.fc1(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.head = MLP(), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.mlp(x))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    ALU.n, ALU.at = 0, 5
    batches = [(torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(7)]
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
