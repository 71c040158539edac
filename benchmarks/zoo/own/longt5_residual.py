import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="longt5_residual",
    title=(
        "Pre-norm decoder in half: the feed-forward output fits, but added to the grown residual stream it "
        "passes 65504"
    ),
    source="huggingface/transformers#5651, #19229, #9295", fidelity="adapted",
    precision="fp16", phase="forward", cause="overflow_fp16", op=["add"],
    module="decoder.blocks.1", line="x = x + self.wo(F.relu(self.wi(self.ln2(x))))",
    fix="Keep the residual stream in fp32 / bf16 or clamp it to the half range.",
    recoverable_by=["skip", "fp32", "fix_code"], step=3, symptom="loss",
)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mix, self.wi, self.wo = nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        x = x + self.mix(self.ln1(x))
        x = x + self.wo(F.relu(self.wi(self.ln2(x))))
        return x


class Decoder(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb, self.blocks = nn.Embedding(30, d), nn.ModuleList([Block(d), Block(d)])

    def forward(self, ids):
        x = self.emb(ids).half()
        for b in self.blocks:
            x = b(x)
        return x


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder, self.norm, self.lm_head = Decoder(), nn.LayerNorm(16), nn.Linear(16, 30)

    def forward(self, ids):
        return self.lm_head(self.norm(self.decoder(ids).float()))


def loss_fn(model, batch):
    out = model(batch[:, :-1])
    return F.cross_entropy(out.reshape(-1, 30).float(), batch[:, 1:].reshape(-1))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, 29, (4, 9), generator=g) for _ in range(6)]
    batches[3][2, 4] = 29                                    # a rare token with a huge channel
    m = T5()
    with torch.no_grad():
        m.decoder.emb.weight[29, 3] = 60000.0
        m.decoder.blocks[0].wo.weight[3].zero_()
        m.decoder.blocks[1].wi.weight[:, 3].fill_(1.0)
        m.decoder.blocks[1].wo.weight[3].fill_(60.0)
        m.decoder.blocks[1].wi.weight[:, 3].copy_(torch.full((64,), 1.0))
    return m, torch.optim.SGD(m.parameters(), 1e-4), batches, loss_fn
