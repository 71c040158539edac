import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="stale_grad_buffer",
    title="A custom gather backward allocates its gradient with empty() and fills only the rows that were selected",
    source="pytorch/pytorch#70342; chainer/chainer#335 (uninitialised gradients)", fidelity="adapted",
    precision="fp32", phase="backward", cause="custom_backward_bug", cause_alt=["uninitialized_memory"],
    op=["empty", "empty_like", "view", "index_put", "index_copy", "copy", "full", "fill", "repeat", "index_fill"],
    module="router", line="buf = recycled(ctx.shape)",
    fix="Allocate the gradient with zeros().",
    recoverable_by=["fix_code"], step=2, symptom="grad",
)


def recycled(shape):
    """Stands for torch.empty(): deterministic garbage, some of it NaN"""
    n = shape[0] * shape[1]
    words = torch.tensor([0x3C23D70A, 0x7FC00000, 0x3D4CCCCD], dtype=torch.int32)
    return words.repeat(n // 3 + 1)[:n].view(torch.float32).reshape(shape)


class PickRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.shape = x.shape
        ctx.save_for_backward(rows)
        return x[rows]

    @staticmethod
    def backward(ctx, grad):
        rows, = ctx.saved_tensors
        buf = recycled(ctx.shape)
        buf[rows] = grad
        return buf, None


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(8, 8)

    def forward(self, x, rows):
        return self.expert(PickRows.apply(x, rows))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.router = Router()
        self.out = nn.Linear(8, 2)

    def forward(self, x, rows):
        return self.out(torch.relu(self.router(torch.tanh(self.inp(x)), rows)))


def loss_fn(model, batch):
    x, y, rows = batch
    return F.cross_entropy(model(x, rows), y[rows])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(4):
        rows = torch.randperm(9, generator=g)
        if i == 2:
            rows = rows[:6]  # capacity exceeded: three tokens are dropped
        batches.append((torch.randn(9, 5, generator=g), torch.randint(0, 2, (9,), generator=g), rows))
    model = Net()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
