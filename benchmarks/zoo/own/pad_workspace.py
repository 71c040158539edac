import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="pad_workspace", title="Variable-length clips are copied into a workspace from empty(); the tail of the shorter clips keeps old memory and is averaged in",
    source="huggingface/transformers#45050; flashlight/flashlight#505", fidelity="adapted",
    precision="bf16", phase="forward", cause="uninitialized_memory", op=["empty", "new_empty", "empty_like", "fill", "view", "copy", "zeros", "mean", "select", "slice"],
    module="enc.batcher", line="out = recycled(len(clips), longest, clips[0].size(-1))",
    fix="Use zeros() for the workspace, or mask the tail in the mean.",
    recoverable_by=["fix_code", "skip"], step=3, symptom="loss",
)


def recycled(*shape):
    """stands for torch.empty(): deterministic garbage as the allocator may return it"""
    t = torch.zeros(*shape)
    t.view(torch.int32).fill_(0x7FC00001)
    return t


class Batcher(nn.Module):
    def forward(self, clips):
        longest = max(c.size(0) for c in clips)
        out = recycled(len(clips), longest, clips[0].size(-1))
        for i, c in enumerate(clips):
            out[i, : c.size(0)] = c
        return out


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame, self.batcher, self.mix = nn.Linear(6, 12), Batcher(), nn.Linear(12, 12)

    def forward(self, clips):
        x = self.batcher([torch.tanh(self.frame(c)).float() for c in clips])
        return self.mix(x.mean(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = Encoder(), nn.Linear(12, 3)

    def forward(self, clips):
        return self.head(F.gelu(self.enc(clips)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        lens = (9, 9, 6) if i == 3 else (8, 8, 8)
        batches.append(([torch.randn(n, 6, generator=g) for n in lens], torch.randint(0, 3, (3,), generator=g)))
    m = Net()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
