import torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

CASE = dict(
    id="weight_norm_pruned",
    title="Weight-normalised vocoder layer: a callback zeroes the direction of an unused filter, g * v / |v| is 0 / 0",
    source="pytorch/pytorch#19126; google/flax#1671", fidelity="direct",
    precision="fp32", phase="forward", cause="division_by_near_zero_norm", cause_alt=["zero_over_zero"],
    op=["_weight_norm_interface", "_weight_norm", "weight_norm_interface", "div"],
    module="gen.up.parametrizations.weight.0", module_alt=["gen.up", "gen.up.parametrizations.weight"],
    line="h = F.leaky_relu(self.up(h), 0.1)",
    fix="Prune the gain g instead of the direction v, or add an eps to the norm of v.",
    recoverable_by=["fix_code"], step=3, symptom="loss",
)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.up, self.out = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 1, 1)
        weight_norm(self.up)

    def forward(self, mel):
        h = F.leaky_relu(self.inp(mel), 0.1)
        h = F.leaky_relu(self.up(h), 0.1)
        return torch.tanh(self.out(h))


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen = Generator()

    def forward(self, mel):
        return self.gen(mel)


@torch.no_grad()
def prune(model, channel):
    model.gen.up.parametrizations.weight.original1[channel].zero_()


def loss_fn(model, batch):
    mel, wav, epoch_end = batch
    if epoch_end:
        prune(model, 5)
    return F.l1_loss(model(mel), wav)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        batches.append((torch.randn(3, 4, 16, generator=g), torch.rand(3, 1, 16, generator=g) * 2 - 1, i == 3))
    m = Vocoder()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
