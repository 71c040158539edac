import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="tied_cosine_head",
    title="The output head shares the embedding and normalises its rows; the zero padding row becomes 0 / 0",
    source="own (weight tying with a cosine head and padding_idx)", fidelity="adapted",
    precision="fp32", phase="forward", cause="division_by_near_zero_norm", cause_alt=["zero_over_zero"],
    op=["div"], module="head", line="w = self.weight / self.weight.norm(dim=1, keepdim=True)",
    fix="F.normalize(self.weight, dim=1).",
    recoverable_by=["fix_code"], step=0, symptom="loss",
)


class CosineHead(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, h):
        w = self.weight / self.weight.norm(dim=1, keepdim=True)
        return 10 * F.normalize(h, dim=-1) @ w.t()


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(18, 12, padding_idx=0)
        self.rnn = nn.LSTM(12, 12, batch_first=True)
        self.head = CosineHead(self.tok.weight)

    def forward(self, ids):
        h, _ = self.rnn(self.tok(ids))
        return self.head(h)


def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randint(1, 18, (4, 7), generator=g) for _ in range(3)]
    model = LM()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
