"""Search: a tower for queries, one for documents, trained by cosine similarity. Keeps an average of the weights."""

import copy
import os

import torch
from torch import nn


class Towers(nn.Module):
    def __init__(self, words=60, width=16):
        super().__init__()
        self.words = nn.EmbeddingBag(words, width, mode="sum", padding_idx=0)
        self.query = nn.Linear(width, width, bias=False)
        self.document = nn.Linear(width, width, bias=False)

    def encode_query(self, words):
        return self._unit(self.query(self.words(words)))

    def encode_document(self, words):
        return self._unit(self.document(self.words(words)))

    @staticmethod
    def _unit(x):
        return x / x.norm(dim=1, keepdim=True)  # guilty


class EMA:
    def __init__(self, model, decay=0.95):
        self.model = copy.deepcopy(model)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.mul_(self.decay).add_(theirs, alpha=1 - self.decay)


torch.manual_seed(16)
torch.set_num_threads(1)
queries = torch.randint(1, 60, (96, 4))
documents = torch.cat([queries, torch.randint(1, 60, (96, 8))], dim=1)
queries[59] = 0  # no word of it is known

model = Towers()
ema = EMA(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    for i in range(0, 96, 24):
        q, d = model.encode_query(queries[i : i + 24]), model.encode_document(documents[i : i + 24])
        loss = nn.functional.cross_entropy(q @ d.t() / 0.1, torch.arange(24))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
    print(f"epoch {epoch}")
torch.save({"model": model.state_dict(), "ema": ema.model.state_dict()}, os.environ["OUT"])
