import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="huge_relation_param",
    title=(
        "The query projection is a bare Parameter(torch.empty(..)): finite garbage of 1e38 overflows when it "
        "is first used"
    ),
    source="tail-unica/hopwise#271; gordicaleksa/pytorch-GAT#11; FeiGSSS/DySAT_pytorch#3", fidelity="direct",
    precision="fp32", phase="parameter", phase_alt=["forward"], cause="uninitialized_memory",
    cause_alt=["parameter_corrupted", "overflow_any_precision"], op=["mm", "matmul", "linear"],
    module="graph.attention", line="self.w_q = nn.Parameter(stale(dim, dim))",
    fix="Initialise the parameter (xavier_uniform_) after allocating it.",
    recoverable_by=["fix_code"], step=2, symptom="loss",
)


def stale(*shape):
    """Stands for torch.empty(): the memory still holds the bytes of an integer index (as float32 about 1e38)"""
    n = shape[0] * shape[1]
    words = torch.tensor([0x7E967699, 0x3D4CCCCD, 0x7F0A1B2C, 0x00000007], dtype=torch.int32)
    return words.repeat(n // 4 + 1)[:n].view(torch.float32).reshape(shape).clone()


class RelationAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w_q = nn.Parameter(stale(dim, dim))

    def forward(self, head, tail):
        score = ((head @ self.w_q) * (tail @ self.w_q)).sum(-1)
        return torch.softmax(score, -1).unsqueeze(-1) * tail


class Graph(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.entity = nn.Embedding(25, dim)
        self.attention = RelationAttention(dim)


class KGRec(nn.Module):
    def __init__(self):
        super().__init__()
        self.graph = Graph(8)
        self.score = nn.Linear(8, 1)

    def forward(self, users, items, hops):
        u = self.graph.entity(users)
        v = self.graph.entity(items)
        if hops:
            v = v + self.graph.attention(u, v)
        return self.score(u * v).squeeze(-1)


def loss_fn(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["u"], batch["v"], batch["hops"]), batch["y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(4):
        u, v = torch.randint(0, 25, (2, 12), generator=g)
        batches.append({"u": u, "v": v, "y": torch.randint(0, 2, (12,), generator=g).float(), "hops": int(i >= 2)})
    model = KGRec()
    return model, torch.optim.Adagrad(model.parameters(), 0.05), batches, loss_fn
