import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="healthy_topk_running_best",
    title="Top-k routing fills the rest with -inf, the best score so far starts at -inf, log of 0 is taken by xlogy",
    source="own (mixture-of-experts routing)", fidelity="control",
    precision="fp16", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Router(nn.Module):
    def __init__(self, d, experts, k):
        super().__init__()
        self.gate = nn.Linear(d, experts)
        self.k = k
        self.register_buffer("best", torch.full((experts,), float("-inf")))

    def forward(self, x):
        scores = self.gate(x).float()
        with torch.no_grad():
            self.best.copy_(torch.maximum(self.best, scores.amax(0)))
        value, index = scores.topk(self.k, -1)
        sparse = torch.full_like(scores, float("-inf")).scatter(-1, index, value)
        return sparse.softmax(-1), sparse.logsumexp(-1)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router(8, 5, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        weight, z = self.router(x)
        mixed = sum(weight[:, i:i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.out(mixed), weight, z


def loss_fn(model, batch):
    logits, weight, z = model(batch[0])
    load = weight.detach().mean(0)
    model.load_entropy = float(-torch.xlogy(load, load).sum())
    return F.cross_entropy(logits.float(), batch[1]) + 1e-3 * z.pow(2).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(6, 8, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(8)]
    model = MoE()
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), batches, loss_fn
