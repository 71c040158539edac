import torch
import torch.nn as nn

CASE = dict(
    id="hmm_logsumexp_backward",
    title="Log-space forward algorithm: an unreachable state is logsumexp(-inf, -inf); finite loss, NaN gradient",
    source="pytorch/pytorch#31829",
    fidelity="direct",
    precision="fp32",
    phase="backward",
    cause="inf_minus_inf",
    cause_alt=["masked_softmax_all_neg_inf", "zero_times_inf"],
    op=["logsumexp"],
    module="align.dp",
    line="reach = torch.logsumexp(torch.stack([stay, step]), dim=0)",
    fix="Use a large negative finite number for log 0.",
    recoverable_by=["skip", "fix_code", "fix_data"],
    step=3,
    symptom="grad",
)


class MonotonicDP(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.start = start

    def forward(self, logp, jump):
        alpha = logp[0] + self.start
        for t in range(1, len(logp)):
            stay = alpha
            step = torch.cat([alpha.new_full((1,), float("-inf")) if jump else alpha[:1], alpha[:-1]])
            reach = torch.logsumexp(torch.stack([stay, step]), dim=0)
            alpha = reach + logp[t]
        return alpha[alpha > float("-inf")].amax()


class Align(nn.Module):
    def __init__(self):
        super().__init__()
        self.emit = nn.Linear(6, 5)
        self.dp = MonotonicDP(torch.tensor([0.0, -2.0, -3.0, -4.0, -5.0]))

    def forward(self, frames, strict):
        logp = self.emit(frames).log_softmax(-1)
        if strict:
            closed = torch.zeros(5)
            closed[1:] = float("-inf")
            logp = torch.cat([logp[:1] + closed, logp[1:]])
        return self.dp(logp, jump=strict)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.align = Align()


def loss_fn(model, batch):
    return -sum(model.align(frames, strict) for frames, strict in batch) / len(batch)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(5):
        batches.append([(torch.randn(7, 6, generator=g), i == 3 and k == 1) for k in range(3)])
    m = Model()
    return m, torch.optim.Adam(m.parameters(), 1e-2), batches, loss_fn
