import torch
import torch.nn as nn

CASE = dict(
    id="joint_prob_product",
    title="Sequence likelihood as the log of a product of token probabilities: a long sequence underflows to 0 in fp32",
    source="own (log of a product of probabilities instead of a sum of logs)",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="log_of_zero",
    op=["log"],
    module="lm.likelihood",
    line="return -torch.log(torch.prod(token_p, dim=1)).mean()",
    fix="Sum the log-probabilities.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=4,
    symptom="loss",
)


class Likelihood(nn.Module):
    def forward(self, prob, target):
        token_p = prob.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return -torch.log(torch.prod(token_p, dim=1)).mean()


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(25, 12)
        self.attn = nn.Linear(12, 36)
        self.out = nn.Linear(12, 25)
        self.likelihood = Likelihood()

    def forward(self, ids):
        q, k, v = self.attn(self.embed(ids)).chunk(3, -1)
        score = q @ k.transpose(1, 2) / 12 ** 0.5
        causal = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).triu(1)
        score = score.masked_fill(causal, float("-inf"))
        h = torch.softmax(score, -1) @ v
        return self.likelihood(torch.softmax(self.out(h), -1)[:, :-1], ids[:, 1:])


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = LM()


def loss_fn(model, batch):
    return model.lm(batch) / batch.size(1)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, 25, (3, n), generator=g) for n in (8, 12, 16, 10, 60, 12)]
    m = Trainer()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
