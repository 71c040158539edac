import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="bn_raw_feature", title="A raw sensor value of 3e21 reaches nn.BatchNorm1d: its variance overflows float32 and running_var stays inf, although loss and gradients are finite",
    source="pytorch/pytorch#1206, #90342", fidelity="adapted",
    precision="fp32", phase="buffer", phase_alt=["forward"], cause="overflow_any_precision", cause_alt=["buffer_corrupted"], op=["native_batch_norm", "batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "var"],
    module="trunk.norm", line="h = self.norm(self.proj(x))",
    fix="Clip raw features before the first normalisation; reset the poisoned running statistics.",
    recoverable_by=["fix_data", "fix_code"], step=3, symptom="buffer",
)


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.norm, self.out = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x):
        h = self.norm(self.proj(x))
        return self.out(F.relu(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()

    def forward(self, x):
        return self.trunk(x)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 6, generator=g), torch.randint(0, 3, (10,), generator=g)) for _ in range(6)]
    batches[3][0][4, 2] = 3e21
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
