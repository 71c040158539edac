"""Will the customer buy? Logistic regression from first principles."""

import sys

import torch

torch.manual_seed(0)
torch.set_num_threads(1)

age = torch.randint(18, 80, (200,)).float()
income = 40_000 + 15_000 * torch.randn(200)
x = torch.stack([age, income], dim=1)
y = (income / 1000 + age + 10 * torch.randn(200) > 90).float()

w = torch.zeros(2, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([w, b], lr=0.01)

for step in range(30):
    p = torch.sigmoid(x @ w + b)
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # guilty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")

torch.save({"w": w.detach(), "b": b.detach()}, sys.argv[1])
