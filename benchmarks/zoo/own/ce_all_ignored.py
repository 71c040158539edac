import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="ce_all_ignored",
    title="Instruction tuning: truncation removed all answer tokens, every label is -100 and the mean is 0 / 0",
    source="pytorch/pytorch#116349, #75181; OpenRLHF/OpenRLHF#583; nvidia-cosmos/cosmos-rl#155",
    fidelity="direct",
    precision="bf16",
    phase="forward",
    phase_alt=["data"],
    cause="all_labels_ignored",
    cause_alt=["label_out_of_domain"],
    op=["nll_loss", "nll_loss_forward", "cross_entropy", "cross_entropy_loss", "nll_loss_nd"],
    module="",
    line="return F.cross_entropy(flat.float(), labels.reshape(-1), ignore_index=-100)",
    fix="Skip batches without a labelled token, or sum and divide by max(count, 1).",
    recoverable_by=["skip", "fix_data", "fix_code"],
    step=2,
    symptom="loss",
)


class Decoder(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.wte = nn.Embedding(32, d)
        self.block = nn.TransformerEncoderLayer(d, 2, 32, dropout=0.0, batch_first=True)
        self.ln_f = nn.LayerNorm(d)

    def forward(self, ids):
        causal = nn.Transformer.generate_square_subsequent_mask(ids.size(1))
        return self.ln_f(self.block(self.wte(ids), src_mask=causal))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = Decoder()
        self.lm_head = nn.Linear(16, 32, bias=False)

    def forward(self, ids):
        return self.lm_head(self.transformer(ids))


def causal_lm_loss(logits, labels):
    flat = logits[:, :-1].flatten(0, 1)
    labels = labels[:, 1:]
    return F.cross_entropy(flat.float(), labels.reshape(-1), ignore_index=-100)


def loss_fn(model, batch):
    return causal_lm_loss(model(batch["input_ids"]), batch["labels"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        ids = torch.randint(0, 32, (2, 9), generator=g)
        labels = ids.clone()
        labels[:, :5] = -100
        if i == 2:
            labels[:] = -100
        batches.append({"input_ids": ids, "labels": labels})
    m = CausalLM()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
