"""Fine-tunes a head on a frozen backbone, with batch norm, plateau schedule and averaged weights."""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(37)
torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(8 * 16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.head(self.backbone(x))


model = Model()
for parameter in model.backbone.parameters():
    parameter.requires_grad = False
optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.3)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
x = torch.randn(256, 1, 16)
y = (x.mean((1, 2)) > 0).long()
for epoch in range(6):
    model.train()
    for rows in torch.randperm(192).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        average.update_parameters(model)
    model.eval()
    with torch.inference_mode():
        validation = nn.functional.cross_entropy(model(x[192:]), y[192:]).item()
    scheduler.step(validation)
    print(f"epoch {epoch}: validation {validation:.4f}, lr {optimizer.param_groups[0]['lr']:.4f}")
    if epoch == 3:  # the rest is let loose as well
        model.backbone.requires_grad_(True)
        optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 0.01})
torch.save({"model": model.state_dict(), "average": average.module.state_dict()}, sys.argv[1])
