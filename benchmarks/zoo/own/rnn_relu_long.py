import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="rnn_relu_long",
    title=(
        "nn.RNN with relu and a recurrent gain above 1: short windows are fine, one window of 400 steps "
        "overflows float32"
    ),
    source="pytorch/examples#223 (RNN_RELU); own", fidelity="adapted",
    precision="fp32", phase="forward", cause="overflow_any_precision", cause_alt=["gradient_explosion"],
    op=["rnn_relu", "addmm", "mm", "linear", "add", "relu"], module="enc.rnn",
    line="_, h = self.rnn(x)",
    fix="Use tanh / a gated cell, bound the recurrent gain or truncate the window.",
    recoverable_by=["skip", "fix_code", "fix_data"], step=4, symptom="loss",
)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 10, nonlinearity="relu", batch_first=True)

    def forward(self, x):
        _, h = self.rnn(x)
        return torch.log1p(h[-1])


class Monitor(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = Encoder()
        self.out = nn.Linear(10, 2)

    def forward(self, x):
        return self.out(self.enc(x))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["window"]), batch["fault"])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        n = 400 if i == 4 else 25
        batches.append({"window": torch.rand(4, n, 3, generator=g), "fault": torch.randint(0, 2, (4,), generator=g)})
    model = Monitor()
    with torch.no_grad():
        model.enc.rnn.weight_ih_l0.abs_()
        model.enc.rnn.weight_hh_l0.copy_(torch.eye(10) * 1.3)
    return model, torch.optim.SGD(model.parameters(), 1e-5), batches, loss_fn
