import torch
import torch.nn as nn

CASE = dict(
    id="dpp_logdet",
    title="Determinantal point process: a set that lists an item twice has a singular kernel, logdet is -inf",
    source="own (DPP likelihood); compare ryhorv/tf-flowavenet#3",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="log_of_zero",
    op=["logdet", "linalg_slogdet", "_linalg_slogdet", "slogdet", "log"],
    module="kernel",
    line="return torch.logdet(sub) - torch.logdet(full)",
    fix="Remove duplicates from the set (or add a diagonal jitter).",
    recoverable_by=["skip", "fix_data", "fix_code"],
    step=3,
    symptom="loss",
)


class Kernel(nn.Module):
    def __init__(self, items, rank):
        super().__init__()
        self.factor = nn.Embedding(items, rank)

    def forward(self, chosen):
        v = self.factor.weight
        full = torch.eye(v.size(0)) + v @ v.t()
        s = self.factor(chosen)
        sub = s @ s.t()
        return torch.logdet(sub) - torch.logdet(full)


class Basket(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = Kernel(12, 6)

    def forward(self, baskets):
        return torch.stack([self.kernel(b) for b in baskets])


def loss_fn(model, batch):
    return -model(batch).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [[torch.randperm(12, generator=g)[:3] for _ in range(4)] for _ in range(5)]
    batches[3][1] = torch.tensor([7, 7])  # two copies of one article
    m = Basket()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
