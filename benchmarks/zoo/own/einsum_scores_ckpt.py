import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CASE = dict(
    id="einsum_scores_ckpt",
    title="Checkpointed attention block without query scaling: an outlier frame lifts the einsum scores past fp16",
    source="lucidrains/imagen-pytorch#69; huggingface/transformers#11461 (NaN in T5 attention, fp16)",
    fidelity="adapted",
    precision="fp16",
    phase="forward",
    cause="overflow_fp16",
    op=["bmm", "einsum", "matmul", "mm"],
    module="video.blocks.2.mixer",
    line='scores = torch.einsum("bihd,bjhd->bhij", q, k)',
    fix="Scale (or normalise) the queries before the product.",
    recoverable_by=["skip", "fp32", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class Mixer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        scores = scores - scores.detach().amax(-1, keepdim=True)
        prob = torch.softmax(scores * q.size(-1) ** -0.5, -1)
        return self.out(torch.einsum("bhij,bjhd->bihd", prob, v).flatten(2))


class Block(nn.Module):
    def __init__(self, d, gain):
        super().__init__()
        self.mixer = Mixer(d, 2)
        self.gain = gain

    def forward(self, x):
        return x + torch.tanh(self.mixer(x * self.gain))


class Video(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.stem = nn.Linear(6, d)
        self.blocks = nn.ModuleList([Block(d, 1.0), Block(d, 1.0), Block(d, 30.0)])

    def forward(self, frames):
        x = self.stem(frames)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.video = Video()
        self.head = nn.Linear(16, 4)

    def forward(self, frames):
        return self.head(torch.tanh(self.video(frames)).mean(1))


def loss_fn(model, batch):
    frames, label = batch
    return F.cross_entropy(model(frames), label)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(3, 7, 6, generator=g), torch.randint(0, 4, (3,), generator=g)) for _ in range(5)]
    batches[3][0][1, 4] *= 60.0
    batches[3][0][1, 5] = -batches[3][0][1, 4]  # the camera flash and its echo
    m = Net()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
