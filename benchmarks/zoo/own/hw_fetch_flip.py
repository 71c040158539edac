import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="hw_fetch_flip",
    title=(
        "One embedding row arrives from the parameter server with its exponent bits set, once; fetched "
        "again it is fine"
    ),
    source="pytorch/torchtitan#951; microsoft/dion#76; tenstorrent/tt-metal#20940", fidelity="adapted",
    precision="fp32", phase="forward", cause="nondeterministic_hardware_fault",
    op=["view", "bitwise_or", "copy", "index_put", "clone", "where", "embedding", "select", "slice", "add", "sub"],
    module="server", module_alt=["server.table"], line="rows = CHANNEL(self.table(ids))",
    fix="Nothing in the code: repeat the step and check the link / memory of that host.",
    recoverable_by=["skip"], step=4, symptom="loss", nondeterministic=True,
    crude_disagrees="the corruption is an int-typed bit operation on a copy; running the step again is clean",
)


class Channel:
    def __init__(self):
        self.calls, self.faulty = 0, None

    def __call__(self, rows):
        self.calls += 1
        if self.calls != self.faulty:
            return rows
        raw = rows.detach().clone().view(torch.int32)
        raw[3, 1, 2] = raw[3, 1, 2] | 0x7F800001
        return rows + (raw.view(torch.float32) - rows.detach())


CHANNEL = Channel()


class Server(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 6)

    def forward(self, ids):
        rows = CHANNEL(self.table(ids))
        return rows.mean(1)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.server, self.dense, self.top = Server(), nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, ids, x):
        return self.top(F.relu(self.server(ids) * self.dense(x))).squeeze(-1)


def loss_fn(model, batch):
    ids, x, y = batch
    return F.binary_cross_entropy_with_logits(model(ids, x), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    CHANNEL.calls, CHANNEL.faulty = 0, 5
    batches = []
    for _ in range(7):
        y = torch.randint(0, 2, (8,), generator=g).float()
        batches.append((torch.randint(0, 50, (8, 3), generator=g), torch.randn(8, 4, generator=g), y))
    m = DLRM()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
