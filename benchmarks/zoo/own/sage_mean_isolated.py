import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="sage_mean_isolated",
    title=(
        "GraphSAGE mean aggregator divides the neighbour sum by the degree; after edge dropout a node is "
        "isolated: 0 / 0"
    ),
    source="diegoantognini/pyGAT#11 (dropout makes some row sums zero); pyg-team/pytorch_geometric#61",
    fidelity="adapted",
    precision="bf16", phase="forward", cause="zero_over_zero", op=["div"],
    module="enc.layer2.agg", line="return total / count",
    fix="count.clamp(min=1), or add self loops after the edge dropout.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class MeanAgg(nn.Module):
    def forward(self, h, src, dst):
        total = torch.zeros(h.shape, dtype=h.dtype).index_add(0, dst, h[src])
        count = torch.zeros(h.size(0), 1, dtype=h.dtype).index_add(0, dst, torch.ones(len(dst), 1, dtype=h.dtype))
        return total / count


class Sage(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.agg, self.own, self.nbr = MeanAgg(), nn.Linear(i, o), nn.Linear(i, o)

    def forward(self, h, src, dst):
        return self.own(h) + self.nbr(self.agg(h, src, dst))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = Sage(6, 12), Sage(12, 3)

    def forward(self, x, hop1, hop2):
        h = F.relu(self.layer1(x, *hop1))
        return self.layer2(h, *hop2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = Encoder()

    def forward(self, *a):
        return self.enc(*a)


def loss_fn(model, batch):
    x, hop1, hop2, y = batch
    return F.cross_entropy(model(x, hop1, hop2).float(), y)


def sample_edges(g, keep_all):
    ring = torch.arange(10)
    src, dst = torch.cat([ring, ring]), torch.cat([(ring + 1) % 10, (ring + 3) % 10])
    if keep_all:
        return src, dst
    keep = dst != 6                      # both incoming edges of node 6 were dropped
    return src[keep], dst[keep]


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        y = torch.randint(0, 3, (10,), generator=g)
        batches.append((torch.randn(10, 6, generator=g), sample_edges(g, True), sample_edges(g, i != 3), y))
    m = Net()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
