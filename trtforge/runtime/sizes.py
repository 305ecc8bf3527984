"""Sizes of an engine's inputs by name, and inputs of these sizes to measure with."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from trtforge.release.manifest import TensorRecord
from trtforge.runtime.lane import Array
from trtforge.runtime.session import EngineSession
from trtforge.traffic.layout import Layout, Sizes, layout_of
from trtforge.types import Profile, Shape, TensorSpec


def layout(inputs: Iterable[TensorRecord]) -> Layout:
    """The open sizes of an engine's inputs."""
    return layout_of(TensorSpec(one.name, one.dtype, one.shape) for one in inputs)


def shapes(inputs: Iterable[TensorRecord], sizes: Sizes) -> dict[str, Shape]:
    """Input name -> shape at these sizes."""
    known = layout(inputs)
    return known.shapes(sizes[name] for name in known.names)


def generated(inputs: Iterable[TensorRecord], sizes: Sizes) -> dict[str, Array]:
    """Inputs to measure with: seeded normal numbers, and ones for integers, which index every table of two rows."""
    tensors = tuple(inputs)
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for tensor, (name, shape) in zip(tensors, shapes(tensors, sizes).items(), strict=True):
        if "float" in tensor.dtype:
            feeds[name] = rng.standard_normal(math.prod(shape), np.float32).reshape(shape)
        else:
            feeds[name] = np.ones(shape, tensor.dtype)
    return feeds


def at_sizes(session: EngineSession, sizes: Sizes) -> tuple[Profile, dict[str, Array]]:
    """The profile that runs these sizes, and inputs for it; inputs that are sizes themselves have the profile's opt.

    Raises:
        GraphError: no profile allows the sizes.
    """
    feeds = generated(session.artifact.inputs, sizes)
    profile = session.profile(feeds)
    for name, values in profile.values.items():
        feeds[name] = np.array(values.opt, feeds[name].dtype).reshape(feeds[name].shape)
    return profile, feeds
