import torch, torch.nn as nn

CASE = dict(
    id="healthy_gradient_repair", title="The author knows that the root has an infinite slope at 0 and repairs the gradient in a hook with nan_to_num",
    source="kornia/kornia#367", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 3)

    def forward(self, x):
        h = torch.relu(self.net(x))
        if h.requires_grad:
            h.register_hook(lambda g: g.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        return h.sqrt()


def loss_fn(model, batch):
    return (model(batch) - 1.0).square().mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-2), [torch.randn(8, 3, generator=g) for _ in range(6)], loss_fn
