import torch, torch.nn as nn

CASE = dict(
    id="bf16_clock_delta", title="Sensor velocities are dx / dt with time stamps stored in bf16: neighbouring stamps round to the same number and dt is 0",
    source="own (time stamps in low precision)", fidelity="analogue",
    precision="fp32", phase="forward", cause="div_by_zero", op=["div"],
    module="", line="v = (x[:, 1:] - x[:, :-1]) / (t[:, 1:] - t[:, :-1]).unsqueeze(-1)", fix="Keep time stamps in fp32.",
    recoverable_by=["fix_code", "skip", "fix_data", "fp32"], step=2, symptom="loss",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, v):
        return self.out(self.rnn(v)[0][:, -1])


def velocities(x, t):
    t = t.to(torch.bfloat16)
    v = (x[:, 1:] - x[:, :-1]) / (t[:, 1:] - t[:, :-1]).unsqueeze(-1)
    return v.float()


def loss_fn(model, batch):
    x, t, y = batch
    return nn.functional.mse_loss(model(velocities(x, t)).squeeze(-1), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = []
    for step in range(4):
        t = torch.arange(6).float().repeat(5, 1)
        if step == 2:
            t[3] += 1000.0
        batches.append((torch.randn(5, 6, 3, generator=g), t, torch.randn(5, generator=g)))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
