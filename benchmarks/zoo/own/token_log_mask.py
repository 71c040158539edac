import torch
import torch.nn as nn

CASE = dict(
    id="token_log_mask",
    title="Copy mechanism: a padded target has probability 0, its log is -inf and the mask multiplies it by 0",
    source="own (0 * log 0 under a padding mask); compare pytorch/pytorch#40553",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="zero_times_inf",
    cause_alt=["log_of_zero"],
    op=["mul", "log"],
    module="copy.score",
    line="return -(torch.log(picked) * keep).sum() / keep.sum()",
    fix="Select the valid positions (or clamp the probability) before the log.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class CopyScore(nn.Module):
    def forward(self, prob, target, keep):
        picked = prob.gather(2, target.unsqueeze(-1)).squeeze(-1)
        return -(torch.log(picked) * keep).sum() / keep.sum()


class CopyNet(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.vocab = vocab
        self.q = nn.Linear(8, 8)
        self.score = CopyScore()

    def forward(self, h, source, memory, target, keep):
        attn = torch.softmax(self.q(h) @ memory.transpose(1, 2), -1)
        prob = attn.new_zeros(*attn.shape[:2], self.vocab)
        prob = prob.scatter_add(2, source[:, None].expand_as(attn), attn)
        return self.score(prob, target, keep)


class Summariser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.copy = CopyNet(20)


def loss_fn(model, batch):
    source, target, keep = batch
    memory = model.embed(source)
    h, _ = model.rnn(model.embed(target))
    return model.copy(h, source, memory, target, keep)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        source = torch.randint(1, 20, (3, 8), generator=g)
        order = torch.randint(0, 8, (3, 5), generator=g)
        target = source.gather(1, order)
        keep = torch.ones(3, 5)
        if i == 3:
            target[1, 3:] = 0  # the pad token is never in the source
            keep[1, 3:] = 0.0
        batches.append((source, target, keep))
    m = Summariser()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
