import torch, torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

CASE = dict(
    id="healthy_packed_padding", title="Packed GRU outputs are unpacked with -inf as padding value, so that the maximum over time ignores it",
    source="own (max pooling over packed sequences)", fidelity="control",
    precision="fp32", phase="none", cause="none", op=[], module="", line="", fix="nothing to fix", recoverable_by=[],
    step=None,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x, n):
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, padding_value=float("-inf"))
        return self.out(h.amax(1))


def loss_fn(model, batch):
    x, n, y = batch
    return nn.functional.cross_entropy(model(x, n), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(4, 7, 3, generator=g), torch.tensor([7, 2, 5, 1]), torch.randint(0, 2, (4,), generator=g)) for _ in range(6)]
    return m, torch.optim.Adam(m.parameters(), 1e-2), batches, loss_fn
