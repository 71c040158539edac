import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="gat_edge_exp",
    title=(
        "Edge softmax of a graph attention layer exponentiates the raw scores without subtracting the "
        "maximum of the node"
    ),
    source="pyg-team/pytorch_geometric#53; JuliaGraphs/GraphNeuralNetworks.jl#246", fidelity="direct",
    precision="bf16", phase="forward", cause="exp_overflow", op=["exp"],
    module="convs.1", line="e = torch.exp(F.leaky_relu(score, 0.2))",
    fix="Subtract the per-node maximum (scatter_reduce amax) before exp.",
    recoverable_by=["skip", "fix_code"], step=4, symptom="loss",
)


class GATConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o, bias=False)
        self.att_src, self.att_dst = nn.Parameter(torch.randn(o) * 0.3), nn.Parameter(torch.randn(o) * 0.3)

    def forward(self, x, src, dst):
        h = self.lin(x).float()
        score = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
        e = torch.exp(F.leaky_relu(score, 0.2))
        norm = torch.zeros(x.size(0)).index_add(0, dst, e)
        alpha = e / norm[dst].clamp(min=1e-12)
        return torch.zeros_like(h).index_add(0, dst, alpha[:, None] * h[src])


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GATConv(6, 16), GATConv(16, 4)])

    def forward(self, x, src, dst):
        x = F.elu(self.convs[0](x, src, dst))
        return self.convs[1](x, src, dst)


def loss_fn(model, batch):
    x, src, dst, y = batch
    return F.cross_entropy(model(x, src, dst), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        x = torch.randn(12, 6, generator=g)
        src, dst = torch.randint(0, 12, (40,), generator=g), torch.randint(0, 12, (40,), generator=g)
        batches.append((x, src, dst, torch.randint(0, 4, (12,), generator=g)))
    m = GAT()
    with torch.no_grad():
        m.convs[0].att_src.mul_(0.02)
        m.convs[0].att_dst.mul_(0.02)
        m.convs[1].lin.weight.abs_()
        m.convs[1].att_src.abs_()
        m.convs[1].att_dst.abs_()
    batches[4] = (batches[4][0].abs() * 300.0, *batches[4][1:])  # raw features of a new crawl
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
