import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="task_uncertainty", title="Learned task weights exp(-s): the second task is solved perfectly, its log-variance runs away and the precision overflows",
    source="yaringal/multi-task-learning-example#6; lukasliebel/MultiDepth#2", fidelity="adapted",
    precision="fp32", phase="forward", cause="exp_overflow", op=["exp"],
    module="weigh", line="precision = torch.exp(-self.s)",
    fix="Clamp the log-variance (or its learning rate); drop tasks whose loss is 0.",
    recoverable_by=["lower_lr", "clip", "fix_code"], step=23, symptom="loss", seeds=[0],
)


class Weigh(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        precision = torch.exp(-self.s)
        return (precision * losses + self.s).sum()


class MTL(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.depth, self.mask = nn.Linear(6, 12), nn.Linear(12, 1), nn.Linear(12, 1)
        self.weigh = Weigh(2)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.depth(h), F.relu(self.mask(h))


def loss_fn(model, batch):
    x, d, seg = batch
    pd, pm = model(x)
    return model.weigh(torch.stack([F.mse_loss(pd, d), F.mse_loss(pm, seg)]))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 6, generator=g), torch.randn(8, 1, generator=g), torch.zeros(8, 1)) for _ in range(40)]
    m = MTL()
    with torch.no_grad():
        m.mask.bias.fill_(-9.0)
    groups = [dict(params=m.weigh.parameters(), lr=4.0), dict(params=[p for n, p in m.named_parameters() if not n.startswith("weigh")], lr=1e-3)]
    return m, torch.optim.SGD(groups), batches, loss_fn
