import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="dqn_no_target", title="Q-learning bootstraps from its own maximum without a target network and with SGD lr 0.5: the Q values feed on themselves and diverge",
    source="facebookresearch/ReAgent#189; keras-rl/keras-rl#28", fidelity="adapted",
    precision="fp32", phase="forward", phase_alt=["backward"], cause="gradient_explosion", cause_alt=["overflow_any_precision"],
    op=["mse_loss", "pow", "mm", "addmm", "linear", "add", "mul"], module="", module_alt=["q", "q.value"], line="return F.mse_loss(q, r + 0.99 * best)",
    fix="Use a target network, a lower learning rate and gradient clipping.",
    recoverable_by=["clip", "lower_lr", "fix_code"], step=6, symptom="loss", seeds=[0],
    crude_disagrees="explosion is a process over steps; which op overflows first is an accident",
)


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.value = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, s):
        return self.value(F.relu(self.body(s)))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = QNet()


def loss_fn(model, batch):
    s, a, r, s2 = batch
    with torch.no_grad():
        best = model.q(s2).amax(1)
    q = model.q(s).gather(1, a[:, None]).squeeze(1)
    return F.mse_loss(q, r + 0.99 * best)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(40):
        s = torch.rand(16, 6, generator=g)
        batches.append((s, torch.randint(0, 3, (16,), generator=g), torch.rand(16, generator=g), s * 1.5))
    m = Agent()
    return m, torch.optim.SGD(m.parameters(), lr=0.5), batches, loss_fn
