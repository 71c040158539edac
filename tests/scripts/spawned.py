"""Samples are made by other processes, which are spawned and import this file again."""

import sys

import torch
import torch.multiprocessing as mp
from torch import nn

print("module", __name__, file=sys.stderr if __name__ != "__main__" else sys.stdout)


def produce(queue, seed, count):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    for _ in range(count):
        queue.put(torch.randn(16, 3, generator=generator).tolist())


def main():
    torch.manual_seed(41)
    torch.set_num_threads(1)
    context = mp.get_context("spawn")
    queue = context.Queue()
    producer = context.Process(target=produce, args=(queue, 41, 10))
    producer.start()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adadelta(model.parameters())
    for step in range(10):
        x = torch.tensor(queue.get(timeout=200))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
    producer.join()
    print("producer", producer.exitcode)
    torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
