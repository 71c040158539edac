import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="signed_sqrt_fn",
    title="Bilinear pooling with a custom signed-sqrt Function: its hand-written backward divides by an output of 0",
    source="jnhwkim/cbp#1; pytorch/pytorch#1416; HaoMood/bilinear-cnn#4",
    fidelity="direct",
    precision="fp32",
    phase="backward",
    cause="custom_backward_bug",
    cause_alt=["div_by_zero", "sqrt_grad_at_zero"],
    op=["div"],
    module="pool.1",
    line="return 0.5 * grad / root.abs()",
    fix="Divide by root.abs() + eps in the backward.",
    recoverable_by=["skip", "fix_code"],
    step=3,
    symptom="grad",
)


class SignedSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        root = x.sign() * x.abs().sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx, grad):
        (root,) = ctx.saved_tensors
        return 0.5 * grad / root.abs()


class SSR(nn.Module):
    def forward(self, x):
        return SignedSqrt.apply(x)


class Outer(nn.Module):
    def forward(self, f):
        return torch.einsum("bip,bjp->bij", f, f).flatten(1) / f.size(-1)


class BCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(3, 4, 1), nn.ELU())
        self.pool = nn.Sequential(Outer(), SSR())
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.pool(self.features(x)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(4, 3, 6, generator=g) + 0.1, torch.randint(0, 3, (4,), generator=g)) for _ in range(5)]
    m = BCNN()
    with torch.no_grad():
        m.features[0].bias.zero_()
    m.features[0].bias.requires_grad_(False)
    batches[3][0][2] = 0.0  # an empty crop
    return m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 1e-2), batches, loss_fn
