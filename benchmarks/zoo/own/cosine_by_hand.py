import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="cosine_by_hand",
    title="Hand-written cosine similarity in a caption retrieval model: an image without any region has a zero vector",
    source="own; compare francois-rozet/piqa#33, HobbitLong/SupContrast#50",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="division_by_near_zero_norm",
    cause_alt=["zero_over_zero", "div_by_zero"],
    op=["div"],
    module="match",
    line="return dot / (length(a)[:, None] * length(b)[None])",
    fix="F.cosine_similarity (or clamp the product of the norms).",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


def length(v):
    return v.pow(2).sum(-1).clamp(min=0).detach().sqrt()


def cosine(a, b):
    dot = a @ b.t()
    return dot / (length(a)[:, None] * length(b)[None])


class Match(nn.Module):
    def forward(self, image, text):
        return 5.0 * cosine(image, text)


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.region = nn.Linear(7, 10, bias=False)
        self.word = nn.EmbeddingBag(50, 10)
        self.match = Match()
        self.seen = []

    def forward(self, regions, count, words):
        keep = (torch.arange(regions.size(1))[None] < count[:, None]).float()
        image = (self.region(regions) * keep.unsqueeze(-1)).sum(1)
        with torch.no_grad():
            self.seen.append(image[count > 3].std().item())  # NaN in a statistic nobody trains on
        return self.match(image, self.word(words))


def loss_fn(model, batch):
    sim = model(*batch)
    target = torch.arange(sim.size(0))
    return 0.5 * (F.cross_entropy(sim, target) + F.cross_entropy(sim.t(), target))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        count = torch.randint(1, 6, (6,), generator=g)
        if i == 1:
            count.clamp_(max=3)
        if i == 3:
            count[4] = 0
        batches.append((torch.randn(6, 5, 7, generator=g), count, torch.randint(0, 50, (6, 4), generator=g)))
    m = Retrieval()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
