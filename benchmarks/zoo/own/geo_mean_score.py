import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="geo_mean_score",
    title=(
        "Geometric mean of expert scores as exp(mean(log(s))): one saturated sigmoid is 0; the value is 0, "
        "the gradient NaN"
    ),
    source="google-deepmind/optax#1786; RasmussenLab/vamb#12", fidelity="adapted",
    precision="fp32", phase="forward", phase_alt=["backward"], cause="log_of_zero",
    cause_alt=["zero_times_inf", "zero_over_zero"], op=["log"],
    module="fuse", line="return torch.exp(torch.log(s).mean(-1))",
    fix="Average F.logsigmoid of the logits instead of the log of the sigmoid.",
    recoverable_by=["skip", "fix_code"], step=3, symptom="grad",
)


class Fuse(nn.Module):
    def forward(self, s):
        return torch.exp(torch.log(s).mean(-1))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Linear(5, 1) for _ in range(3))
        self.fuse = Fuse()

    def forward(self, x):
        s = torch.cat([torch.sigmoid(n(x)) for n in self.nets], 1)
        return self.fuse(s)


def loss_fn(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.rand(8, 5, generator=g), torch.rand(8, generator=g)) for _ in range(6)]
    m = Experts()
    with torch.no_grad():
        for n in m.nets:
            n.weight.abs_()
            n.bias.fill_(0.3)
        m.nets[1].weight[0, 2] = -1.5
    batches[3][0][2] = torch.tensor([0.1, 0.1, 90.0, 0.1, 0.1])
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
