import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="kl_masked_vocab",
    title="Exact KL between policy and reference with constrained decoding: both log-probs are -inf, -inf - (-inf)",
    source="NovaSky-AI/SkyRL#2259; pytorch/pytorch#40553 (masked logits)",
    fidelity="adapted",
    precision="fp32",
    phase="forward",
    cause="inf_minus_inf",
    op=["sub"],
    module="kl",
    line="ratio = logp - ref_logp.detach()",
    fix="Evaluate the KL on the allowed tokens only (or mask with a finite number).",
    recoverable_by=["skip", "fix_code"],
    step=2,
    symptom="loss",
)


class TokenKL(nn.Module):
    def forward(self, logits, ref_logits, allowed):
        hole = ~allowed
        logp = logits.masked_fill(hole, float("-inf")).log_softmax(-1)
        ref_logp = ref_logits.masked_fill(hole, float("-inf")).log_softmax(-1)
        ratio = logp - ref_logp.detach()
        return (logp.exp() * ratio).sum(-1).mean()


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(18, 10)
        self.mix = nn.Linear(10, 10)
        self.head = nn.Linear(10, 18)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.wte(ids))))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = LM()
        self.reference = LM().requires_grad_(False)
        self.kl = TokenKL()


def loss_fn(model, batch):
    ids, allowed, adv = batch
    logits = model.policy(ids)
    with torch.no_grad():
        ref = model.reference(ids)
    pg = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (pg.view(ids.size(0), -1).mean(1) * adv).mean() + 0.1 * model.kl(logits, ref, allowed)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        allowed = torch.ones(3, 6, 18, dtype=torch.bool)
        if i == 2:
            allowed[1, 2:4, 9:] = False  # first sample with a JSON grammar
        batches.append((torch.randint(0, 18, (3, 6), generator=g), allowed, torch.randn(3, generator=g)))
    m = Pair()
    return m, torch.optim.Adam(m.policy.parameters(), 1e-3), batches, loss_fn
