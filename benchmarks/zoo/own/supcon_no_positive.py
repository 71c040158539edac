import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="supcon_no_positive",
    title="Supervised contrastive loss: an anchor whose class occurs once in the batch has no positive, 0 / 0",
    source="HobbitLong/SupContrast#141, #50",
    fidelity="direct",
    precision="fp32",
    phase="forward",
    cause="zero_over_zero",
    op=["div"],
    module="objective",
    line="mean_log_prob = (positive * log_prob).sum(1) / positive.sum(1)",
    fix="Average over anchors that have at least one positive (clamp the count at 1).",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="loss",
)


class SupCon(nn.Module):
    def __init__(self, tau=0.2):
        super().__init__()
        self.tau = tau

    def forward(self, z, y):
        own = torch.eye(len(y), dtype=torch.bool)
        logits = (z @ z.t() / self.tau).masked_fill(own, float("-inf"))  # an anchor is not its own negative
        log_prob = (logits - torch.logsumexp(logits, 1, keepdim=True)).masked_fill(own, 0.0)
        positive = ((y[:, None] == y[None]) & ~own).float()
        mean_log_prob = (positive * log_prob).sum(1) / positive.sum(1)
        return -mean_log_prob.mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.project = nn.Linear(16, 8)
        self.objective = SupCon()

    def forward(self, x, y):
        return self.objective(F.normalize(self.project(self.backbone(x)), dim=-1), y)


def loss_fn(model, batch):
    return model(batch["x"], batch["y"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        y = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])[torch.randperm(8, generator=g)]
        if i == 3:
            y[5] = 9
        batches.append({"x": torch.randn(8, 6, generator=g), "y": y})
    m = Encoder()
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
