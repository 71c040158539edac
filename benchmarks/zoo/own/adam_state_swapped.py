import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="adam_state_swapped",
    title="The resume code restores the two Adam moments in the wrong order: sqrt of a first moment is NaN",
    source="NVIDIA-NeMo/RL#3544; bitsandbytes-foundation/bitsandbytes#1382 (NaN after restoring the optimizer)",
    fidelity="adapted",
    precision="bf16", phase="optimizer", cause="optimizer_state_corrupted", cause_alt=["sqrt_of_negative"],
    op=["sqrt", "sqrt_"], module="net.enc", module_alt=["net.dec", "net"],
    line='state["exp_avg"], state["exp_avg_sq"] = moments[1], moments[0]',
    fix="Restore by name, not by position.",
    recoverable_by=["fix_code", "fix_data"], step=4, symptom="weight",
)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(10, 4)
        self.dec = nn.Linear(4, 10)

    def forward(self, x):
        return self.dec(torch.tanh(self.enc(x)))


class Job(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = AutoEncoder()

    def forward(self, x):
        return self.net(x)


def snapshot(opt):
    return {p: (s["exp_avg"].clone(), s["exp_avg_sq"].clone()) for p, s in opt.state.items()}


def restore(opt, saved):
    for p, moments in saved.items():
        state = opt.state[p]
        state["exp_avg"], state["exp_avg_sq"] = moments[1], moments[0]


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(i, torch.randn(12, 10, generator=g)) for i in range(6)]
    model = Job()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss_fn(job, batch):
        step, x = batch
        if step == 4:  # preempted and resumed
            restore(opt, snapshot(opt))
        return F.mse_loss(job(x).float(), x)

    return model, opt, batches, loss_fn
