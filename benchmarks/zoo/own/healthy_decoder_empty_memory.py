import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="healthy_decoder_empty_memory",
    title="One sample hides its whole memory: the library decoder returns 0 for such rows, nothing becomes NaN",
    source="pytorch/pytorch#119371, #24816 (fixed behaviour)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class SlotReader(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.slots = nn.Parameter(torch.randn(1, 3, 16) * 0.2)
        self.inp = nn.Linear(5, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, events, pad):
        memory = self.inp(events)
        q = self.slots.expand(events.size(0), -1, -1)
        h = self.decoder(q, memory, memory_key_padding_mask=pad)
        return self.out(h)


def loss_fn(model, batch):
    events, lengths, y = batch
    pad = torch.arange(events.size(1))[None] >= lengths[:, None]
    return F.cross_entropy(model(events, pad).flatten(0, 1), y.flatten())


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        lengths = torch.randint(2, 7, (4,), generator=g)
        if i == 3:
            lengths[2] = 0
        batches.append((torch.randn(4, 6, 5, generator=g), lengths, torch.randint(0, 4, (4, 3), generator=g)))
    model = SlotReader()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
