"""Mixed precision with a GradScaler, on records that were parsed from text."""

import io
import sys

import torch
from torch import nn

torch.manual_seed(9)
torch.set_num_threads(1)

lines = [",".join(f"{v:.3f}" for v in row) for row in torch.randn(256, 9).tolist()]
lines[137] = lines[137].replace(lines[137].split(",")[3], "nan", 1)  # how the lab writes "not measured"
table = torch.tensor([[float(v) for v in line.split(",")] for line in io.StringIO("\n".join(lines))])
features, target = table[:, :8], table[:, 8:]

model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

for epoch in range(3):
    for x, y in zip(features.split(32), target.split(32), strict=True):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            prediction = model(x)  # guilty
            loss = nn.functional.mse_loss(prediction, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch}  scale {scaler.get_scale():g}")

torch.save({"model": model.state_dict()}, sys.argv[1])
