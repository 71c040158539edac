import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="momentum_half_resume", title="The resume code stores the momentum in fp16 to save space: the buffer of the un-normalised regression head exceeds 65504 and comes back as inf",
    source="marin-community/marin#3330; chelsea0x3b/dfdx#748", fidelity="adapted",
    precision="fp32", phase="optimizer", cause="optimizer_state_corrupted", cause_alt=["overflow_fp16"], op=["add", "add_", "mul", "mul_", "to_copy", "_to_copy", "copy", "copy_"],
    module="head.out", line='st["momentum_buffer"] = st["momentum_buffer"].half().float()',
    fix="Save optimizer state in fp32 (or bf16).",
    recoverable_by=["fix_code", "fix_data"], step=3, symptom="weight",
    crude_disagrees="the blamed line restores the state, the inf reaches the weights inside torch.optim",
)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.hid, self.out = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, h):
        return self.out(F.relu(self.hid(h)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(5, 16), nn.Tanh()), Head()

    def forward(self, x):
        return self.head(self.body(x))


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(16, 5, generator=g), torch.rand(16, 1, generator=g) * 6e4, i) for i in range(6)]
    m = Net()
    opt = torch.optim.SGD(m.parameters(), lr=1e-8, momentum=0.9)

    def loss_fn(model, batch):
        x, y, i = batch
        if i == 3:  # resumed from last.ckpt
            for st in opt.state.values():
                st["momentum_buffer"] = st["momentum_buffer"].half().float()
        return F.mse_loss(model(x), y)

    return m, opt, batches, loss_fn
