import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="fused_ce_empty", title="Chunked cross-entropy Function guards its forward mean against zero valid tokens, the hand-written backward divides by the raw count",
    source="linkedin/Liger-Kernel#968, #678", fidelity="adapted",
    precision="bf16", phase="backward", cause="custom_backward_bug", cause_alt=["zero_over_zero"], op=["div"],
    module="lm.loss", line="d = d * (valid.unsqueeze(-1) / valid.sum())",
    fix="Use the clamped count of the forward in the backward as well.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="grad",
)


class ChunkCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, y):
        valid = (y >= 0).float()
        logp = z.float().log_softmax(-1)
        ctx.save_for_backward(logp, y, valid)
        nll = -logp.gather(1, y.clamp(min=0)[:, None]).squeeze(1)
        return (nll * valid).sum() / valid.sum().clamp(min=1)

    @staticmethod
    def backward(ctx, g):
        logp, y, valid = ctx.saved_tensors
        d = logp.exp() - F.one_hot(y.clamp(min=0), logp.size(-1))
        d = d * (valid.unsqueeze(-1) / valid.sum())
        return (g * d).to(logp.dtype), None


class Loss(nn.Module):
    def forward(self, z, y):
        chunks = zip(z.float().chunk(2), y.chunk(2))
        return sum(ChunkCE.apply(a, b) for a, b in chunks) / 2


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.head, self.loss = nn.Embedding(24, 12), nn.GRU(12, 12, batch_first=True), nn.Linear(12, 24), Loss()

    def forward(self, ids, y):
        h, _ = self.rnn(self.emb(ids))
        return self.loss(self.head(h).flatten(0, 1), y.flatten())


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = LM()


def loss_fn(model, batch):
    return model.lm(*batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        ids = torch.randint(0, 24, (4, 7), generator=g)
        y = ids.roll(-1, 1)
        y[:, :2] = -100
        if i == 3:
            y[2:] = -100  # two prompts without an answer fill the second chunk
        batches.append((ids, y))
    m = Trainer()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
