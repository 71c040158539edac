import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="gate_entropy_half", title="Gate entropy p log(p + 1e-8) in half precision: the eps is 0 in fp16 and a closed gate gives log(0)",
    source="pytorch/pytorch#41663; xingyizhou/CenterNet#121", fidelity="adapted",
    precision="fp16", phase="forward", cause="eps_underflow", cause_alt=["log_of_zero", "zero_times_inf"], op=["log"],
    module="net.gate.reg", line="ent = -(p * torch.log(p + 1e-8) + (1 - p) * torch.log1p(-p * 0.999))",
    fix="Compute the entropy in fp32 (or from the logits with logsigmoid).",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="loss", seeds=[0],
)


class EntropyReg(nn.Module):
    def forward(self, p):
        ent = -(p * torch.log(p + 1e-8) + (1 - p) * torch.log1p(-p * 0.999))
        return ent.float().mean()


class Gate(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc, self.reg = nn.Linear(d, d), EntropyReg()

    def forward(self, h):
        p = torch.sigmoid(self.fc(h))
        return h * p, self.reg(p)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(6, 12), Gate(12), nn.Linear(12, 2)

    def forward(self, x):
        h, r = self.gate(F.relu(self.inp(x)))
        return self.out(h), r


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()


def loss_fn(model, batch):
    z, r = model.net(batch[0])
    return F.cross_entropy(z, batch[1]) + 0.01 * r


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 6, generator=g), torch.randint(0, 2, (8,), generator=g)) for _ in range(5)]
    m = Wrapper()
    with torch.no_grad():
        m.net.gate.fc.weight[3].abs_().neg_()
    batches[3][0][2] *= 60.0
    return m, torch.optim.SGD(m.parameters(), 1e-2), batches, loss_fn
