import torch, torch.nn as nn, torch.nn.functional as F

CASE = dict(
    id="ndvi_nodata",
    title="Vegetation index (nir - red) / (nir + red) is computed when the tile is read; a no-data pixel is 0 / 0",
    source="cytomining/DeepProfiler#298 (all-black crop); torchgeo/torchgeo#713; ialhashim/DenseDepth#65",
    fidelity="adapted",
    precision="fp16", phase="data", cause="input_nonfinite", cause_alt=["zero_over_zero"],
    op=["conv2d", "convolution", "cat", "to", "_to_copy", "mkldnn_convolution", "div"],
    module="enc.stem", module_alt=["", "enc"], line="ndvi = (nir - red) / (nir + red)",
    fix="Add an eps to the denominator or set the index of no-data pixels to 0.",
    recoverable_by=["skip", "fix_data", "fix_code"], step=3, symptom="loss",
)


def read_tile(g, nodata):
    bands = torch.rand(4, 2, 8, 8, generator=g) + 0.1
    if nodata:
        bands[2, :, 0:2, 5] = 0.0        # swath edge
    red, nir = bands[:, :1], bands[:, 1:]
    ndvi = (nir - red) / (nir + red)
    return torch.cat([red, nir, ndvi], 1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mid = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return F.relu(self.mid(F.relu(self.stem(x)))).mean((2, 3))


class CropNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.head = Encoder(), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.enc(x))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def build(seed):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    batches = [(read_tile(g, i == 3), torch.randint(0, 3, (4,), generator=g)) for i in range(6)]
    m = CropNet()
    return m, torch.optim.SGD(m.parameters(), 0.01), batches, loss_fn
