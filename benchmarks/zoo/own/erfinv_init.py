import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="erfinv_init",
    title="Own normal initialiser by inverse CDF: a uniform draw of exactly 0 becomes erfinv(-1) = -inf in one weight",
    source="pytorch/pytorch#155588, #145498; allenai/OLMo#277", fidelity="adapted",
    precision="bf16", phase="parameter", cause="parameter_corrupted", cause_alt=["uninitialized_memory"],
    op=["embedding"], module="item_emb", line="w = std * 1.4142135 * torch.erfinv(2 * u - 1)",
    fix="Clamp the uniform draws to [1e-7, 1 - 1e-7] before erfinv.",
    recoverable_by=["fix_code"], step=0, loss_step=3, symptom="weight",
)


def inverse_cdf_normal(shape, std, g):
    u = torch.rand(shape, generator=g)
    u[25, 3] = 0.0                       # the device generator draws from [0, 1), 0 included
    w = std * 1.4142135 * torch.erfinv(2 * u - 1)
    return w


class Recommender(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.user_emb, self.item_emb, self.out = nn.Embedding(20, 8), nn.Embedding(30, 8), nn.Linear(8, 1)
        with torch.no_grad():
            self.item_emb.weight.copy_(inverse_cdf_normal((30, 8), 0.1, g))

    def forward(self, u, i):
        return self.out(self.user_emb(u) * self.item_emb(i)).squeeze(-1)


def loss_fn(model, batch):
    u, i, y = batch
    return F.binary_cross_entropy_with_logits(model(u, i).float(), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Recommender(g)
    batches = []
    for k in range(6):
        u, i = torch.randint(0, 20, (8,), generator=g), torch.randint(0, 25, (8,), generator=g)
        if k == 3:
            i[4] = 25
        batches.append((u, i, torch.randint(0, 2, (8,), generator=g).float()))
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
