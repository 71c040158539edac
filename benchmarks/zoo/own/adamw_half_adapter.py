import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = dict(
    id="adamw_half_adapter",
    title="Half-precision adapter under AdamW: the squared small gradients and eps=1e-8 both round to 0, m / 0 is inf",
    source="NVIDIA/apex#240; afiaka87/glide-finetune#6; CambioML/pykoi#69", fidelity="direct",
    precision="fp16", phase="optimizer", cause="optimizer_eps_underflow", cause_alt=["eps_underflow", "div_by_zero"],
    op=["addcdiv", "addcdiv_", "div"], module="adapter.down", module_alt=["adapter.up"],
    line="opt = torch.optim.AdamW(groups, lr=1e-4)",
    fix="Keep the trained weights in fp32 (master weights) or use eps=1e-4.",
    recoverable_by=["fp32", "fix_code"], step=2, symptom="weight",
    recover_note="the adapter is .half(): the fp32 remedy means fp32 parameters",
)


class Adapter(nn.Module):
    def __init__(self, d, r):
        super().__init__()
        self.down = nn.Linear(d, r, bias=False)
        self.up = nn.Linear(r, d, bias=False)

    def forward(self, x):
        return x + 0.01 * self.up(torch.tanh(self.down(x)))


class Reward(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(12, 16)
        self.adapter = Adapter(16, 4)
        self.value = nn.Linear(16, 1)

    def forward(self, x, use_adapter):
        h = torch.relu(self.trunk(x))
        if use_adapter:
            h = self.adapter(h)
        return self.value(h).squeeze(-1)


def loss_fn(model, batch):
    chosen, rejected, stage = batch
    gap = model(chosen, stage > 0) - model(rejected, stage > 0)
    return -F.logsigmoid(gap.float()).mean()


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(4):
        batches.append((torch.randn(8, 12, generator=g), torch.randn(8, 12, generator=g), int(i >= 2)))
    model = Reward()
    model.adapter.half()
    groups = [
        {"params": list(model.trunk.parameters()) + list(model.value.parameters())},
        {"params": list(model.adapter.parameters()), "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=1e-4)
    return model, opt, batches, loss_fn
