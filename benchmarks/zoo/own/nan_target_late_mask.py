import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="nan_target_late_mask",
    title=(
        "Unmeasured properties are NaN in the target and dropped after squaring: the loss is finite, the "
        "gradient 0 * NaN"
    ),
    source="BLAST-AI-ML/synapse#237; pytorch/pytorch#4132; mrodobbe/chemperium#3", fidelity="direct",
    precision="bf16", phase="data", phase_alt=["backward"], cause="input_nonfinite", cause_alt=["zero_times_inf"],
    op=["sub", "pow", "mul"], module="", line='y[2, 1] = float("nan")  # the assay failed',
    fix="Select the measured entries of prediction and target before the difference is formed.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="grad",
)


class PropertyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(9, 24), nn.SiLU()), nn.Linear(24, 3)

    def forward(self, x):
        return self.out(self.body(x)).float()


def loss_fn(model, batch):
    x, y = batch
    err = (model(x) - y).pow(2)
    return err.nanmean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        x, y = torch.randn(8, 9, generator=g), torch.randn(8, 3, generator=g)
        if i == 3:
            y[2, 1] = float("nan")  # the assay failed
        batches.append((x, y))
    m = PropertyNet()
    return m, torch.optim.AdamW(m.parameters(), 1e-3), batches, loss_fn
