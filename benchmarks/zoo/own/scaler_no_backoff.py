import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="scaler_no_backoff", title="GradScaler with init_scale 2^26 and backoff_factor 0.9999: every fp16 gradient overflows, every step is skipped and the scale practically never falls",
    source="NVIDIA/DALI#1377; facebookresearch/fairseq#1529", fidelity="adapted",
    precision="fp16", phase="backward", cause="loss_scale_overflow", cause_alt=["overflow_fp16"], op=["to_copy", "_to_copy", "to", "mm", "linear", "addmm", "mul", "div", "_log_softmax_backward_data", "log_softmax"],
    module="", line='return torch.amp.GradScaler("cpu", init_scale=2.0 ** 26, backoff_factor=0.9999)',
    fix="Use the default backoff factor of 0.5 (and a start scale of 2^16).",
    recoverable_by=["lower_scale", "fp32", "fix_code"], step=0, symptom="grad", loop="scaler",
    crude_disagrees="the overflow happens in the backward of the last layers, the blame lies on the scaler's construction",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.body(x))


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** 26, backoff_factor=0.9999)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(6)]
    m = Net()
    return m, torch.optim.SGD(m.parameters(), 0.05), batches, loss_fn
