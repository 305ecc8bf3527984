"""Export callables that are right."""

from __future__ import annotations

import torch

AXES = {0: "batch", 1: "sequence"}


class Tagger(torch.nn.Module):
    """Embedding, dropout and a linear layer that shares the embedding's weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 8)
        self.dropout = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 50)

    def forward(self, ids, mask):
        hidden = self.dropout(self.embedding(ids) * mask.unsqueeze(-1))
        return self.head(hidden), hidden.mean(1)


def inputs():
    return {"ids": torch.arange(10).reshape(2, 5), "mask": torch.ones(2, 5, dtype=torch.int64)}


def tagger():
    return Tagger(), inputs(), {"ids": AXES, "mask": AXES}


def tagger_by_place():
    return Tagger().eval(), tuple(inputs().values()), {"ids": AXES, "mask": AXES}


def tagger_named():
    parts = {"model": Tagger().eval(), "example_inputs": inputs(), "dynamic_axes": {"ids": AXES, "mask": AXES}}
    return {**parts, "output_names": ["logits", "mean"]}


def tied():
    model = Tagger().eval()
    model.head.weight = model.embedding.weight
    return model, inputs(), {"ids": AXES, "mask": AXES}


class Skips(torch.nn.Module):
    """Leaves a parameter between two inputs at its default."""

    def forward(self, first, scale=3.0, second=None):
        return {"sum": first * scale + second}


def skips():
    return Skips(), {"second": torch.ones(2, 3), "first": torch.ones(2, 3)}, {n: {0: "n"} for n in ("first", "second")}


def static():
    return torch.nn.Linear(3, 2), (torch.ones(4, 3),), {}


class Halves(torch.nn.Module):
    """Takes even lengths only, as networks do that scale down and up again."""

    def forward(self, x):
        return (x.reshape(x.shape[0], -1, 2).sum(-1),)


def halves():
    return Halves(), {"x": torch.ones(2, 8)}, {"x": {0: "batch", 1: "length"}}


def large():
    torch.manual_seed(0)
    return torch.nn.Linear(100, 200), (torch.ones(4, 100),), {"input": {0: "batch"}}


class Difference(torch.nn.Module):
    def forward(self, one, other):
        return one - 2 * other


def difference():
    example = torch.ones(2, 3)
    axes = {0: "rows"}
    return Difference(), {"one": example, "other": example}, {"one": axes, "other": axes}
