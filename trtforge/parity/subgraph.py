"""Cuts the smallest model out of another that still shows what a node does to its actual operands."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

from trtforge.errors import GraphError, TrtForgeError, closest
from trtforge.files import commit, explained, write_aside
from trtforge.parity.interop import save_inputs
from trtforge.parity.lockstep import session_of
from trtforge.reference import HeldValue, held
from trtforge.wiring import Source, Wiring, constants_of, is_large, needed, piece, wire

Array = np.ndarray[Any, np.dtype[Any]]


def extract(
    source: Source, node: str, feeds: Mapping[str, Array], radius: int = 0
) -> tuple[ModelProto, dict[str, Array]]:
    """A node with its weights as a model of its own, and the operands that it gets when the whole model runs on `feeds`.

    Guarantees: values that were computed are inputs, with the sizes they had; everything the nodes give that no node of the
    cut reads, and all that `node` itself gives, is an output; all weights are inside. It passes onnx.checker and was run, or
    else stops as the whole model does at that node; then its outputs have the types that ONNX infers, if any.

    Args:
        source: the model, nodes sorted.
        node: its name.
        feeds: input name -> array, of the whole model.
        radius: how many nodes more to take before and after it.

    Raises:
        GraphError: there is no such node, or the model stops before it.
    """
    wiring = wire(source)
    places = _around(wiring, _place(wiring, node), radius)
    names = needed(wiring, places)
    values = _values(wiring, names, {name: held(feed) for name, feed in feeds.items()})
    outputs = _outputs(wiring, places, wiring.names.index(node))
    model = piece(wiring, places, {name: values[name].type_proto(with_shape=True) for name in names}, outputs)
    for tensor in filter(is_large, constants_of(wiring, places)):
        model.graph.initializer.append(numpy_helper.from_array(wiring.constant(tensor.name), tensor.name))
    _type_outputs(model, wiring, places, values)
    return model, {name: values[name].array.copy() for name in names}


def write(folder: Path, stem: str, model: ModelProto, feeds: Mapping[str, Array]) -> tuple[Path, Path]:
    """Writes what `extract` gave as `STEM.onnx` and `STEM.inputs.json`, and returns both paths.

    polygraphy run STEM.onnx --onnxrt --load-inputs STEM.inputs.json

    Raises:
        StoreError: a file cannot be written.
        SeveralErrors: of `StoreError` problems, for operands of types that numpy's file format loses (bfloat16, float8).
    """
    data = model.SerializeToString()
    path, inputs_path = folder / f"{stem}.onnx", folder / f"{stem}.inputs.json"
    with explained(folder, len(data), f"ls -ld {shlex.quote(str(folder))}"):
        folder.mkdir(parents=True, exist_ok=True)
        aside, _ = write_aside(folder, io.BytesIO(data))
        commit(aside, path)
    save_inputs(inputs_path, [feeds])
    return path, inputs_path


def _place(wiring: Wiring, node: str) -> int:
    if node in wiring.names:
        return wiring.names.index(node)
    meant = closest(node, wiring.names)
    raise GraphError(
        f"{wiring.label} has no node '{node}' in its main graph",
        next_step=f"name '{meant}'" if meant else f"polygraphy inspect model {shlex.quote(wiring.label)} --show layers",
    )


def _around(wiring: Wiring, place: int, radius: int) -> list[int]:
    found = {place}
    for _ in range(radius):
        before = {wiring.producer[name] for at in found for name in wiring.reads[at] if name in wiring.producer}
        given = [name for at in found for name in wiring.nodes[at].output if name]
        found |= before | {reader for name in given for reader in wiring.readers.get(name, ())}
    return sorted(found)


def _values(wiring: Wiring, names: Sequence[str], feeds: Mapping[str, HeldValue]) -> dict[str, HeldValue]:
    """The values by name, computed by no more nodes than they need."""
    todo, places = [name for name in names if name in wiring.producer], set[int]()
    while todo:
        place = wiring.producer[todo.pop()]
        if place not in places:
            places.add(place)
            todo += [name for name in wiring.reads[place] if name in wiring.producer]
    if not places:
        return {name: feeds[name] for name in names}
    ordered = tuple(sorted(places))
    before = {name: feeds[name] for name in needed(wiring, ordered)}
    session = session_of(wiring, ordered, before, [name for name in names if name in wiring.producer])
    return dict(feeds) | session.run(before)


def _outputs(wiring: Wiring, places: Sequence[int], center: int) -> list[str]:
    own = set(places)
    return [
        name
        for place in places
        for name in wiring.nodes[place].output
        if name and (place == center or not own.intersection(wiring.readers.get(name, ())))
    ]


def _type_outputs(model: ModelProto, wiring: Wiring, places: Sequence[int], values: Mapping[str, HeldValue]) -> None:
    """Gives the outputs their types by running the model, and has ONNX check it."""
    names = [output.name for output in model.graph.output]
    before = {name: values[name] for name in needed(wiring, places)}
    try:
        given = session_of(wiring, tuple(places), before, names).run(before)
    except TrtForgeError:
        inferred = {info.name: info for info in _inferred(model).graph.output}
        for output in model.graph.output:
            output.CopyFrom(inferred[output.name])
        return
    for output in model.graph.output:
        output.type.CopyFrom(given[output.name].type_proto(with_shape=True))
    onnx.checker.check_model(model)


def _inferred(model: ModelProto) -> ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model)
    except Exception:  # noqa: BLE001 - onnx throws many types, and the model is meant to be broken
        return model
