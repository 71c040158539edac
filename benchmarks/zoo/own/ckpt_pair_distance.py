import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CASE = dict(
    id="ckpt_pair_distance",
    title=(
        "A checkpointed block takes the root of a squared distance: two atoms in one place make the "
        "recomputed backward NaN"
    ),
    source="pytorch/pytorch#2421 (gradient of a zero norm); own", fidelity="adapted",
    precision="fp32", phase="backward", cause="sqrt_grad_at_zero", op=["sqrt"],
    module="stages.1.edge", line="dist = (a - b).pow(2).sum(-1).sqrt()",
    fix="Add a small eps under the root.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=3, symptom="grad",
)


class Edge(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(1, 6)

    def forward(self, a, b):
        dist = (a - b).pow(2).sum(-1).sqrt()
        return self.score(dist.unsqueeze(-1))


class Stage(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.edge = Edge()
        self.move = nn.Linear(6, 3)
        self.recompute = recompute

    def block(self, pos):
        pos = pos * self.scale
        pull = self.move(torch.tanh(self.edge(pos, pos.roll(1, dims=1))))
        return pos + 0.1 * pull

    def forward(self, pos):
        if self.recompute:
            return checkpoint(self.block, pos, use_reentrant=False)
        return self.block(pos)


class Refiner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.stages = nn.ModuleList([Stage(False), Stage(True)])

    def forward(self, pos, skip_first):
        pos = self.embed(pos)
        for stage in self.stages[1 if skip_first else 0:]:
            pos = stage(pos)
        return pos


def loss_fn(model, batch):
    return F.mse_loss(model(batch["pos"], batch["coarse"]), batch["target"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        pos = torch.randn(3, 5, 3, generator=g)
        if i == 3:
            pos[1, 2] = pos[1, 3]  # a duplicated atom
        batches.append({"pos": pos, "target": torch.randn(3, 5, 3, generator=g), "coarse": i == 3})
    model = Refiner()
    return model, torch.optim.Adam(model.parameters(), 1e-3), batches, loss_fn
