import torch, torch.nn as nn

CASE = dict(
    id="prehook_standardise", title="A forward pre-hook standardises what enters the encoder: a constant signal has a deviation of 0",
    source="own (hooks that normalise)", fidelity="analogue",
    precision="fp32", phase="forward", cause="zero_over_zero", op=["div"],
    module="encoder", module_alt=[""], line="return ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),)", fix="Add an eps to the deviation.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=1, symptom="loss",
)


def standardise(module, args):
    (x,) = args
    return ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 8), nn.ReLU())
        self.head = nn.Linear(8, 1)
        self.encoder.register_forward_pre_hook(standardise)

    def forward(self, x):
        return self.head(self.encoder(x))


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = [(torch.randn(6, 10, generator=g), torch.randint(0, 2, (6,), generator=g).float()) for _ in range(3)]
    batches[1][0][4] = 0.25
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
