import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="retrieval_same_doc",
    title=(
        "Retrieval memory forbids neighbours of the same document; when a batch has only one document no "
        "neighbour is left"
    ),
    source="THUwangcy/ReChorus#8; danielegrattarola/keras-gat#23", fidelity="adapted",
    precision="fp32", phase="forward", cause="masked_softmax_all_neg_inf", op=["softmax"],
    module="lm.layers.1.knn", line="w = F.softmax(sim + bias, dim=-1)",
    fix="Give every query a null neighbour, or zero the rows without any allowed neighbour.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="loss",
)


class KNN(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, doc):
        sim = torch.einsum("id,jd->ij", self.q(x), self.k(x)) / x.size(-1) ** 0.5
        bias = torch.zeros_like(sim)
        bias[doc[:, None] == doc[None]] = -torch.inf
        w = F.softmax(sim + bias, dim=-1)
        return w @ self.v(x)


class Layer(nn.Module):
    def __init__(self, d, retrieve):
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(d), nn.Linear(d, d)
        self.knn = KNN(d) if retrieve else None

    def forward(self, x, doc):
        h = self.norm(x)
        if self.knn is not None:
            h = h + self.knn(h, doc)
        return x + F.gelu(self.ff(h))


class LM(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.layers = nn.ModuleList([Layer(d, False), Layer(d, True)])

    def forward(self, x, doc):
        for layer in self.layers:
            x = layer(x, doc)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lm, self.out = nn.EmbeddingBag(40, 16), LM(), nn.Linear(16, 5)

    def forward(self, ids, doc):
        return self.out(self.lm(self.emb(ids), doc))


def loss_fn(model, batch):
    ids, doc, y = batch
    return F.cross_entropy(model(ids, doc), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        doc = torch.arange(8) // 3
        if i == 3:
            doc = torch.zeros(8, dtype=torch.long)
        batches.append((torch.randint(0, 40, (8, 6), generator=g), doc, torch.randint(0, 5, (8,), generator=g)))
    m = Model()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
