"""A character model: tied embeddings, causal attention, two parameter groups, one cycle, clipping."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = "the cat sat on the mat and the dog sat on the cat while the mat lay on the floor of the old house. " * 8


class CharModel(nn.Module):
    def __init__(self, vocabulary, width=32, length=24):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.05)
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1))

    def forward(self, ids):
        x = self.token(ids) + self.position
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + self.mask
        x = x + self.out(F.softmax(scores, -1) @ v)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("out")
    args = parser.parse_args()
    torch.manual_seed(36)
    torch.set_num_threads(1)
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(c) for c in TEXT])

    model = CharModel(len(letters))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps)
    for step in range(args.steps):
        starts = torch.randint(0, len(data) - 25, (16,))
        batch = torch.stack([data[s : s + 25] for s in starts.tolist()])
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f} norm {norm:.4f} lr {scheduler.get_last_lr()[0]:.6f}")
    with torch.no_grad():
        ids = data[:24].clone()
        text = ""
        for _ in range(20):
            following = torch.multinomial(F.softmax(model(ids[None])[0, -1], -1), 1)
            ids = torch.cat([ids[1:], following])
            text += letters[following.item()]
    print(repr(text))
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
