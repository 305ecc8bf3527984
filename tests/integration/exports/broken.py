"""Export callables that are wrong, each in one way."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import torch
from sound import AXES, Tagger, inputs

DYNAMIC = {"ids": AXES, "mask": AXES}


def raises():
    weights = {"a": 1}
    return weights["head"]


def returns_a_model():
    return Tagger()


def returns_nothing():
    pass


def returns_a_dict_without_axes():
    return {"model": Tagger(), "example_input": inputs()}


def returns_a_class():
    return Tagger, inputs(), DYNAMIC


def misnames():
    both = {"idz": inputs()["ids"], "mask": inputs()["mask"]}
    return Tagger(), both, DYNAMIC


def gives_a_number_as_input():
    return Tagger(), {"ids": 3, "mask": inputs()["mask"]}, DYNAMIC


def many_wrong_axes():
    axes = {"ids": {2: "batch"}, "maks": {0: "batch"}, "mask": {0: "n", 1: "n"}}
    return Tagger(), inputs(), axes


def forgets_an_input():
    return Tagger(), {"mask": inputs()["mask"]}, {"mask": AXES}


def wrong_number_of_names():
    return {"model": Tagger(), "example_inputs": inputs(), "dynamic_axes": DYNAMIC, "output_names": ["logits"]}


def needs_a_package():
    import a_package_that_is_nowhere

    return a_package_that_is_nowhere


class Stops(Tagger):
    def forward(self, ids, mask):
        return self.head(ids)


def model_raises():
    return Stops(), inputs(), DYNAMIC


class Drops(Tagger):
    def forward(self, ids, mask):
        return self.head(self.embedding(ids))


def drops_an_argument():
    return Drops().eval(), inputs(), DYNAMIC


class FreezesBatch(Tagger):
    def forward(self, ids, mask):
        hidden = self.embedding(ids) * mask.unsqueeze(-1)
        return self.head(hidden.reshape(int(ids.shape[0]), -1, 8))


def freezes_batch():
    return FreezesBatch().eval(), inputs(), DYNAMIC


class FreezesLength(Tagger):
    def forward(self, ids, mask):
        positions = torch.arange(int(ids.shape[1]))
        return self.embedding(ids) * mask.unsqueeze(-1) + self.embedding(positions)


def freezes_length():
    return FreezesLength().eval(), inputs(), DYNAMIC


class BranchesOnLength(Tagger):
    def forward(self, ids, mask):
        hidden = self.embedding(ids) * mask.unsqueeze(-1)
        if ids.shape[1] > 7:
            hidden = 2 * hidden
        return self.head(hidden)


def branches_on_length():
    return BranchesOnLength().eval(), inputs(), DYNAMIC


class BranchesOnData(Tagger):
    def forward(self, ids, mask):
        hidden = self.embedding(ids) * mask.unsqueeze(-1)
        if mask.sum() < 10:
            hidden = 2 * hidden
        return self.head(hidden)


def branches_on_data():
    return BranchesOnData().eval(), inputs(), DYNAMIC


class AlwaysDrops(Tagger):
    def forward(self, ids, mask):
        return self.head(torch.nn.functional.dropout(self.embedding(ids) * mask.unsqueeze(-1), 0.5, training=True))


def always_drops():
    return AlwaysDrops().eval(), inputs(), DYNAMIC


class ReturnsText(Tagger):
    def forward(self, ids, mask):
        return {"logits": self.head(self.embedding(ids)), "language": "en"}


def returns_text():
    return ReturnsText().eval(), inputs(), DYNAMIC


class BeyondOnnx(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x)


def beyond_onnx():
    return BeyondOnnx(), {"x": torch.eye(3)}, {}


def loops():
    while True:
        time.sleep(0.01)


def ends_the_process():
    os._exit(3)


def exits():
    sys.exit("no model today")


def crashes():
    ctypes.string_at(0)
