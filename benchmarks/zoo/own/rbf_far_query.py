import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="rbf_far_query",
    title=(
        "Nadaraya-Watson layer divides Gaussian weights by their sum; a query far from every prototype has "
        "only zeros"
    ),
    source="kornia/kornia#4589; bigdatagenomics/utils#55 (an outlier has likelihood 0 everywhere)",
    fidelity="adapted",
    precision="fp32", phase="forward", cause="zero_over_zero", op=["div"],
    module="memory.read", line="w = w / w.sum(-1, keepdim=True)",
    fix="softmax of the negative squared distances (log space) instead of normalised exponentials.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="loss",
)


class Read(nn.Module):
    def __init__(self, bandwidth):
        super().__init__()
        self.bandwidth = bandwidth

    def forward(self, q, keys, values):
        d2 = (q[:, None] - keys[None]).pow(2).sum(-1)
        w = torch.exp(-d2 / (2 * self.bandwidth ** 2))
        w = w / w.sum(-1, keepdim=True)
        return w @ values


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Parameter(torch.randn(10, 3)), nn.Parameter(torch.randn(10, 5))
        self.read = Read(0.8)

    def forward(self, q):
        return self.read(q, self.keys, self.values)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.memory, self.head = nn.Linear(4, 3), Memory(), nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.memory(self.query(x))).squeeze(-1)


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(10, 4, generator=g), torch.randn(10, generator=g)) for _ in range(6)]
    batches[3][0][8] *= 60.0
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
