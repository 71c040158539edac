import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="half_ckpt_load", title="The checkpoint was exported in fp16; a time-scale parameter of 86400 s became inf and is first used by the recency branch at step 3",
    source="huggingface/transformers#12225 (fp16 range); jinxixiang/magic_animate_unofficial#6", fidelity="adapted",
    precision="fp32", phase="parameter", cause="parameter_corrupted", cause_alt=["overflow_fp16"], op=["mul", "div", "_to_copy", "to_copy", "copy"],
    module="recency.decay", line="model.load_state_dict({k: v.half().float() for k, v in state.items()})",
    fix="Export large-valued parameters in fp32 (or store log seconds).",
    recoverable_by=["fix_code", "fix_data"], step=0, loss_step=3, symptom="weight",
)


class Decay(nn.Module):
    def __init__(self):
        super().__init__()
        self.horizon = nn.Parameter(torch.tensor([3600.0, 86400.0]))

    def forward(self, age):
        return torch.exp(-age.unsqueeze(-1) / 1000.0) * (self.horizon * 1e-4)


class Recency(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay, self.mix = Decay(), nn.Linear(2, 4)

    def forward(self, age):
        return self.mix(self.decay(age))


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.recency, self.out = nn.Linear(6, 4), Recency(), nn.Linear(4, 2)

    def forward(self, x, age=None):
        h = torch.tanh(self.base(x))
        if age is not None:
            h = h + self.recency(age)
        return self.out(h)


def resume(model, state):
    model.load_state_dict({k: v.half().float() for k, v in state.items()})


def loss_fn(model, batch):
    x, age, y, use = batch
    return F.cross_entropy(model(x, age if use else None), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 6, generator=g), torch.rand(8, generator=g) * 5000, torch.randint(0, 2, (8,), generator=g), i >= 3) for i in range(5)]
    m = Ranker()
    resume(m, m.state_dict())
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
