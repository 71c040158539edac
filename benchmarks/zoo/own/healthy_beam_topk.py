import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="healthy_beam_topk", title="Minimum-risk training over a beam: dead hypotheses carry -inf scores, torch.where removes them before the softmax-weighted risk",
    source="facebookresearch/fairseq beam search (-inf for finished hypotheses)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[], step=None,
)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.score = nn.Embedding(20, 10), nn.GRU(10, 10, batch_first=True), nn.Linear(10, 1)

    def forward(self, hyp, alive):
        B, K, T = hyp.shape
        _, h = self.rnn(self.emb(hyp.view(B * K, T)))
        return self.score(h[0]).view(B, K).masked_fill(~alive, float("-inf"))


def loss_fn(model, batch):
    hyp, alive, risk = batch
    s = model(hyp, alive)
    p = torch.softmax(s, -1)
    ent = torch.where(alive, s - torch.logsumexp(s, -1, keepdim=True), torch.zeros_like(s)) * p
    return (p * risk).sum(-1).mean() + 0.01 * ent.sum(-1).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(8):
        alive = torch.rand(4, 5, generator=g) > 0.4
        alive[:, 0] = True
        batches.append((torch.randint(0, 20, (4, 5, 6), generator=g), alive, torch.rand(4, 5, generator=g)))
    m = Ranker()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
