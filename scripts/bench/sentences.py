"""Pairs of short English texts that share more or fewer words, as token ids for all-MiniLM-L6-v2.

Seeded: a seed always gives the same pairs. Every word is a token of the vocabulary, so that no tokenizer is needed.
"""
# ruff: noqa: SIM905 - words read better as text

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime import InferenceSession

Array = NDArray[Any]
Feeds = dict[str, Array]

LENGTH = 128
"""Tokens of a text; shorter ones are padded."""
_CLASSIFY, _SEPARATOR = "[CLS]", "[SEP]"
_MOST_SENTENCES = 13
"""As many as fit `LENGTH`."""

_ADJECTIVES = "old young quiet angry happy large small red blue cheap broken famous hungry tired".split()
_NOUNS = (
    "man woman child doctor teacher dog cat horse train car ship house river engine computer guitar company army "
    "student farmer scientist president city garden machine book letter song film storm"
).split()
_VERBS = "sees likes buys sells builds breaks follows finds needs paints drives watches carries destroys".split()
_PLACES = "at home|in paris|at school|on monday|by night|in summer|near london|in the rain|after lunch|in court".split(
    "|"
)
_SLOTS = (["the", "a", "every"], _ADJECTIVES, _NOUNS, _VERBS, ["the", "a"], _NOUNS, _PLACES, ["."])


def pairs(num: int, seed: int, vocabulary: Path) -> Feeds:
    """`num` pairs of texts, (2 * num, `LENGTH`) int64 each input: first and second of a pair stand next to each other.

    The second text has each word of the first with a probability of its own, from 0 to 1, and others in the same places.

    Raises:
        KeyError: a word is not in `vocabulary`, a file with a token a line.
    """
    number = {token: index for index, token in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    rng = np.random.default_rng(seed)
    ids = np.zeros((2 * num, LENGTH), np.int64)
    for row in range(0, 2 * num, 2):
        first = [list(map(rng.choice, _SLOTS)) for _ in range(rng.integers(1, _MOST_SENTENCES + 1))]
        shared = rng.random()
        second = [
            [word if rng.random() < shared else rng.choice(slot) for word, slot in zip(sentence, _SLOTS, strict=True)]
            for sentence in first
        ]
        for place, text in enumerate((first, second)):
            words = " ".join(part for sentence in text for part in sentence).split()[: LENGTH - 2]
            tokens = [number[word] for word in (_CLASSIFY, *words, _SEPARATOR)]
            ids[row + place, : len(tokens)] = tokens
    return {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}


def embeddings(session: InferenceSession, given: Feeds) -> Array:
    """A unit vector for each text, (text, feature)."""
    rows = range(len(given["input_ids"]))
    found = [session.run(None, {name: array[row : row + 1] for name, array in given.items()})[0] for row in rows]
    return np.concatenate(found)
