import torch, torch.nn as nn

CASE = dict(
    id="int16_energy", title="Frame energy of 16-bit audio is squared before it is cast to float: the product wraps around and the root gets a negative number",
    source="own (integer audio pipelines)", fidelity="analogue",
    precision="fp32", phase="forward", cause="sqrt_of_negative", cause_alt=["label_out_of_domain"], op=["sqrt"],
    module="", module_alt=["feats"], line="torch.sqrt((pcm * pcm).float().mean(-1))", fix="Cast to float before squaring.",
    recoverable_by=["fix_code", "skip", "fix_data"], step=1, symptom="loss",
)


class Feats(nn.Module):
    def forward(self, pcm):
        return torch.sqrt((pcm * pcm).float().mean(-1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.feats, self.out = Feats(), nn.Linear(3, 2)

    def forward(self, pcm):
        return self.out(self.feats(pcm) / 100)


def loss_fn(model, batch):
    pcm, y = batch
    return nn.functional.cross_entropy(model(pcm), y)


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    m = Net()
    batches = []
    for step in range(3):
        pcm = torch.randint(-100, 100, (5, 3, 8), generator=g).to(torch.int16)
        if step == 1:
            pcm[3] = 200
        batches.append((pcm, torch.randint(0, 2, (5,), generator=g)))
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
