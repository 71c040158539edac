import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="clip_zero_norm",
    title="Optimizer with built-in clipping scales by max_norm / |g|; on a batch where everything is masked |g| is 0",
    source="PaddlePaddle/Paddle#30777, #32038; tensorflow/tensorflow#22048", fidelity="direct",
    precision="fp32", phase="optimizer", cause="div_by_zero", cause_alt=["zero_times_inf"],
    op=["div", "reciprocal", "mul"],
    module="", module_alt=["emb", "rnn", "out"], line='scale = group["max_norm"] / total',
    fix="clamp(max=1) of max_norm / (total + 1e-6), as torch.nn.utils.clip_grad_norm_ does.",
    recoverable_by=["fix_code", "skip"], step=3, symptom="weight",
)


class ClippedSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, max_norm):
        super().__init__(params, dict(lr=lr, max_norm=max_norm))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            grads = [p.grad for p in group["params"]]
            total = torch.stack([g.norm() for g in grads]).norm()
            scale = group["max_norm"] / total
            for p, g in zip(group["params"], grads):
                p.sub_(g * scale, alpha=group["lr"])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(25, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def loss_fn(model, batch):
    ids, tags, mask = batch
    ce = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten(), reduction="none")
    return (ce * mask.flatten()).sum() / mask.sum().clamp(min=1)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        mask = torch.ones(4, 6)
        if i == 3:
            mask.zero_()                 # no sentence of this batch was annotated
        ids, tags = torch.randint(0, 25, (4, 6), generator=g), torch.randint(0, 4, (4, 6), generator=g)
        batches.append((ids, tags, mask))
    m = Tagger()
    return m, ClippedSGD(m.parameters(), 0.1, 1.0), batches, loss_fn
