"""fp16 with a GradScaler that starts too high and finds its scale, as it is meant to. Clips after unscaling."""

import sys

import torch
from torch import nn

torch.manual_seed(33)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10)
x = torch.randn(320, 16)
y = x[:, :4].argmax(1)

for step in range(40):
    rows = torch.randint(0, 320, (32,))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
    if step % 5 == 0:
        print(f"{step:2d}  loss {loss.item():.4f}  norm {norm.item():.3f}  scale {scaler.get_scale():g}")
torch.save({"model": model.state_dict(), "scale": torch.tensor(scaler.get_scale())}, sys.argv[1])
