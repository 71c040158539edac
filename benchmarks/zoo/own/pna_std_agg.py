import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="pna_std_agg",
    title="PNA standard-deviation aggregator: sqrt(relu(E[x^2] - E[x]^2)) of a node with a single neighbour is sqrt(0)",
    source="pytorch/pytorch#4320; pyg-team/pytorch_geometric#6042", fidelity="adapted",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", cause_alt=["zero_times_inf"], op=["sqrt"],
    module="layers.0.std", line="return torch.sqrt(var)",
    fix="sqrt(var + 1e-5).",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class StdAgg(nn.Module):
    def forward(self, h, adj):
        deg = adj.sum(-1, keepdim=True)
        mean = adj @ h / deg
        var = (adj[:, :, None] * (h[None] - mean[:, None]).pow(2)).sum(1) / deg
        return torch.sqrt(var)


class PNA(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.pre, self.std, self.post = nn.Linear(i, o), StdAgg(), nn.Linear(3 * o, o)

    def forward(self, x, adj):
        h = self.pre(x)
        mean = adj @ h / adj.sum(-1, keepdim=True)
        return self.post(torch.cat([h, mean, self.std(h, adj)], -1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList([PNA(5, 8)]), nn.Linear(8, 3)

    def forward(self, x, adj):
        for layer in self.layers:
            x = F.relu(layer(x, adj))
        return self.out(x)


def loss_fn(model, batch):
    x, adj, y = batch
    return F.cross_entropy(model(x, adj), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        adj = (torch.rand(9, 9, generator=g) > 0.5).float()
        adj[:, 0], adj[:, 1], adj[:, 2] = 1, 1, 1
        if i == 3:
            adj[6] = 0
            adj[6, 2] = 1                # a leaf of the graph
        batches.append((torch.randn(9, 5, generator=g), adj, torch.randint(0, 3, (9,), generator=g)))
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
