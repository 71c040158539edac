import torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

CASE = dict(
    id="sst_land_nan", title="Sea-surface temperature is NaN over land: one buoy drifted ashore and its feature enters a packed LSTM",
    source="openclimatefix/graph_weather#59; google-deepmind/weathernext#145", fidelity="adapted",
    precision="bf16", phase="data", cause="input_nonfinite", op=["linear", "addmm", "mm", "_to_copy", "to_copy", "lstm", "_pack_padded_sequence", "index", "cat", "stack"],
    module="", line='sst[2, 7] = float("nan")  # the cell is land',
    fix="Fill or mask land cells before training.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=4, symptom="loss",
)


class Drift(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.lstm, self.out = nn.Linear(3, 12), nn.LSTM(12, 12, batch_first=True), nn.Linear(12, 2)

    def forward(self, x, lens):
        h = torch.tanh(self.inp(x)).float()
        p, _ = self.lstm(pack_padded_sequence(h, lens, batch_first=True, enforce_sorted=False))
        y, _ = pad_packed_sequence(p, batch_first=True, total_length=x.size(1))
        return self.out(y.float())


def loss_fn(model, batch):
    sst, uv, lens, target = batch
    x = torch.cat([sst.unsqueeze(-1), uv], -1)
    keep = torch.arange(x.size(1))[None] < lens[:, None]
    return F.mse_loss(model(x, lens).float()[keep], target[keep])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(6):
        sst = torch.randn(4, 10, generator=g)
        if i == 4:
            sst[2, 7] = float("nan")  # the cell is land
        batches.append((sst, torch.randn(4, 10, 2, generator=g), torch.tensor([10, 6, 9, 7]), torch.randn(4, 10, 2, generator=g)))
    m = Drift()
    return m, torch.optim.Adam(m.parameters(), 1e-3), batches, loss_fn
