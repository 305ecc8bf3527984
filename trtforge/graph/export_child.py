"""The child side of an export: what is done with torch, in the user's interpreter.

A driver of `trtforge.usercode.child`. `export` calls the user's function and writes ONNX; `run` runs the torch model it
returned. Both give plain values; what is wrong with the model comes back as `problems`, objects with summary, detail and
next_step, for the parent to raise.
"""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

Json = dict[str, Any]
Tell = Callable[[str], None]

_KEYS = ("model", "example_inputs", "dynamic_axes", "output_names")
# Modules that compute something else in training mode.
_MODAL = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - no public base
_LEGACY_MAXIMUM = 20
# torch's own constant; the newer exporter's operators are written for this opset and converted to later ones.
# Source: torch/onnx/_internal/exporter/_constants.py, TORCHLIB_OPSET
_DYNAMO_MINIMUM = 18


class _Wrong(Exception):  # noqa: N818 - it carries problems, and is caught in one place
    def __init__(self, problems: list[Json]) -> None:
        super().__init__(problems[0]["summary"])
        self.problems = problems


def export(function: Callable[[], Any], payload: Json, state: Json, tell: Tell) -> Json:
    """Writes the model that `function` returns to `payload["path"]` as ONNX of `payload["opset"]`.

    Args:
        function: the user's.
        payload: `path`, `opset`, and `inline_limit_bytes`, from which on weights go to files beside the model.
        state: keeps the model for `run`.
        tell: takes what is done now.

    Returns:
        `problems`, or the facts that `trtforge.graph.export` reports.
    """
    try:
        tell("making the model")
        with torch.no_grad():
            case = _case(function())
            facts = _facts(case)
            case["model"].eval()
            tell("running the model at its example inputs")
            _run_example(case)
            tell("exporting")
            is_large = facts["weight_bytes"] >= payload["inline_limit_bytes"]
            facts |= _export(case, Path(payload["path"]), payload["opset"], is_large=is_large)
    except _Wrong as wrong:
        return {"problems": wrong.problems}
    state["case"] = case
    return {
        "problems": [],
        **facts,
        "inputs": case["names"],
        "outputs": case["output_names"],
        "unnamed_outputs": case["unnamed_outputs"],
        "example_shapes": {name: list(tensor.shape) for name, tensor in case["inputs"].items()},
        "dynamic_axes": {
            name: [[axis, symbol] for axis, symbol in axes.items()] for name, axes in case["dynamic_axes"].items()
        },
        "output_axes": {
            name: [[axis, symbol] for axis, symbol in axes.items()] for name, axes in case["output_axes"].items()
        },
        "torch": torch.__version__,
    }


def run(_function: Any, payload: Json, state: Json, tell: Tell) -> Json:
    """Runs the torch model on `payload["feeds"]`, input name -> array; gives output name -> array.

    bfloat16 tensors come back as float32, which holds all their values.
    """
    case = state["case"]
    tell(f"running the torch model at {payload['shapes']}")
    inputs = {name: _to_torch(payload["feeds"][name]) for name in case["names"]}
    with torch.no_grad():
        leaves = _leaves(_called(case, inputs))
    return {name: _to_numpy(tensor) for name, (_, tensor) in zip(case["output_names"], leaves, strict=True)}


def _to_torch(array: Any) -> Any:
    if str(array.dtype) == "bfloat16":
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _to_numpy(tensor: Any) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def _problem(summary: str, next_step: str, *detail: str) -> Json:
    return {"summary": summary, "next_step": next_step, "detail": list(detail)}


def _raise_any(problems: list[Json]) -> None:
    if problems:
        raise _Wrong(problems)


# What the function returned


def _case(returned: Any) -> Json:
    """The parts of what the user's function returned, checked.

    Raises:
        _Wrong: with everything that is wrong.
    """
    parts = _parts(returned)
    model, example = parts["model"], parts["example_inputs"]
    problems = list(_model_problems(model))
    if isinstance(example, torch.Tensor):
        example = (example,)
    problems += _example_problems(example)
    _raise_any(problems)
    names, inputs, skipped = _named(model, example)
    axes = parts.get("dynamic_axes") or {}
    output_names = parts.get("output_names")
    _raise_any([*_axes_problems(axes, inputs, output_names), *_output_name_problems(output_names)])
    return {
        "model": model,
        "names": names,
        # torch.export takes a tensor that is given for two inputs for one input.
        "inputs": {name: tensor.detach().clone() for name, tensor in inputs.items()},
        "skipped": skipped,
        "dynamic_axes": {name: dict(axes[name]) for name in names if name in axes},
        "output_names": list(output_names) if output_names is not None else None,
    }


def _parts(returned: Any) -> Json:
    expected = "a tuple (model, example inputs, dynamic axes) or a dict with model, example_inputs, dynamic_axes"
    step = "return (model, {'input_ids': tensor}, {'input_ids': {0: 'batch'}})"
    if isinstance(returned, Mapping):
        problems = [_unknown(key) for key in returned if key not in _KEYS]
        missing = [key for key in _KEYS[:3] if key not in returned]
        if missing:
            problems.append(_problem(f"returned a dict without {', '.join(missing)}; expected {expected}", step))
        _raise_any(problems)
        return dict(returned)
    if isinstance(returned, tuple) and len(returned) == 3:  # noqa: PLR2004 - the three parts
        return dict(zip(_KEYS, returned, strict=False))
    found = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else _kind(returned)
    raise _Wrong([_problem(f"returned {found}, expected {expected}", step)])


def _unknown(key: Any) -> Json:
    near = difflib.get_close_matches(str(key), _KEYS, n=1)
    step = f"rename it to '{near[0]}'" if near else f"use only {', '.join(_KEYS)}"
    return _problem(f"returned a dict with the unknown key '{key}'", step)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _model_problems(model: Any) -> Iterator[Json]:
    if not isinstance(model, torch.nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else _kind(model)
        step = "return an instance of it" if isinstance(model, type) else "wrap it in a torch.nn.Module"
        yield _problem(f"returned {found} as the model, expected a torch.nn.Module", step)
        return
    devices = {str(tensor.device) for tensor in [*model.parameters(), *model.buffers()]} - {"cpu"}
    if devices:
        step = "make the model on the CPU, with its weights (map_location='cpu'), or call model.to('cpu')"
        yield _problem(f"returned a model on {', '.join(sorted(devices))}, expected one on the CPU", step)


def _example_problems(example: Any) -> list[Json]:
    if not isinstance(example, tuple | list | Mapping) or not example:
        found = _kind(example) if not isinstance(example, tuple | list | Mapping) else "none"
        step = "return a dict of input name -> tensor, in the order of forward"
        return [_problem(f"returned {found} as example inputs, expected a dict or a tuple of tensors", step)]
    pairs = example.items() if isinstance(example, Mapping) else enumerate(example)
    problems = []
    for name, tensor in pairs:
        if isinstance(example, Mapping) and not isinstance(name, str):
            problems.append(_problem(f"returned an example input called {name!r}", "use names that are text"))
        elif not isinstance(tensor, torch.Tensor):
            step = "leave it out and set it in the model, or make it a tensor"
            problems.append(_problem(f"returned {_kind(tensor)} as example input '{name}', expected a tensor", step))
        elif 0 in tensor.shape:
            shape = list(tensor.shape)
            problems.append(_problem(f"example input '{name}' of shape {shape} is empty", "use sizes of 1 or more"))
    return problems


def _named(model: Any, example: Any) -> tuple[list[str], Json, list[str]]:
    """Names of the inputs in the order of `forward`, their tensors, and parameters between them that keep a default."""
    parameters = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    known = [parameter.name for parameter in parameters]
    takes_more = any(p.kind == p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values())
    if not isinstance(example, Mapping):
        if len(example) > len(known) and not takes_more:
            step = f"give {len(known)}, for {', '.join(known)}"
            raise _Wrong([_problem(f"gives {len(example)} example inputs, forward takes {len(known)}", step)])
        names = [known[index] if index < len(known) else f"input_{index}" for index in range(len(example))]
        return names, dict(zip(names, example, strict=True)), []
    strange = [name for name in example if name not in known]
    if strange and len(strange) == len(example) and (takes_more or len(example) <= len(known)):
        return list(example), dict(example), []  # names for the ONNX file alone, in the order of forward
    if strange:
        raise _Wrong([_unknown_input(name, known) for name in strange])
    names = [name for name in known if name in example]
    # The exporters take inputs by place.
    skipped = [parameter for parameter in parameters[: known.index(names[-1])] if parameter.name not in example]
    _raise_any([_without_default(parameter.name) for parameter in skipped if parameter.default is parameter.empty])
    return names, {name: example[name] for name in names}, [parameter.name for parameter in skipped]


def _without_default(name: str) -> Json:
    return _problem(f"gives no example input '{name}', which forward needs", f"add '{name}' to the example inputs")


def _unknown_input(name: str, known: list[str]) -> Json:
    near = difflib.get_close_matches(name, known, n=1)
    step = f"rename it to '{near[0]}'" if near else f"use names of forward: {', '.join(known)}"
    return _problem(f"gives the example input '{name}', which forward does not take", step)


def _axes_problems(axes: Any, inputs: Json, output_names: Any) -> list[Json]:
    form = "write {'input_ids': {0: 'batch', 1: 'sequence'}}"
    if not isinstance(axes, Mapping):
        return [_problem(f"returned {_kind(axes)} as dynamic axes, expected a dict", form)]
    problems: list[Json] = []
    sizes: dict[str, tuple[str, int, int]] = {}
    for name, entry in axes.items():
        if name not in inputs:
            if name in (output_names or ()):
                continue  # what torch calls dynamic axes of outputs follows from the inputs'
            near = difflib.get_close_matches(str(name), list(inputs), n=1)
            step = f"rename it to '{near[0]}'" if near else f"use names of inputs: {', '.join(inputs)}"
            problems.append(_problem(f"gives dynamic axes of '{name}', which is no input", step))
            continue
        if not isinstance(entry, Mapping):
            problems.append(_problem(f"gives {_kind(entry)} as dynamic axes of '{name}', expected a dict", form))
            continue
        rank, shape = inputs[name].dim(), list(inputs[name].shape)
        for axis, symbol in entry.items():
            if isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < rank:
                step = f"use axes 0 to {rank - 1}" if rank else "leave it out: a scalar has no axes"
                problems.append(_problem(f"gives the dynamic axis {axis!r} of '{name}', whose shape is {shape}", step))
            elif not (isinstance(symbol, str) and symbol.isidentifier()):
                summary = f"calls axis {axis} of '{name}' {symbol!r}, expected a name such as 'batch'"
                problems.append(_problem(summary, form))
            elif sizes.setdefault(symbol, (name, axis, shape[axis]))[2] != shape[axis]:
                other, its_axis, size = sizes[symbol]
                summary = f"calls two axes '{symbol}' that differ in size: axis {its_axis} of '{other}' is {size}"
                summary += f", axis {axis} of '{name}' is {shape[axis]}"
                problems.append(_problem(summary, "give one of them a name of its own, or both the same size"))
    return problems


def _output_name_problems(names: Any) -> list[Json]:
    if names is None:
        return []
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        return [_problem("output_names is no list of names", "write output_names: ['logits']")]
    if len(set(names)) != len(names):
        return [_problem("output_names holds a name twice", "give each output a name of its own")]
    return []


# What is known before the export


def _facts(case: Json) -> Json:
    model = case["model"]
    tensors = {tensor.data_ptr(): tensor for tensor in [*model.parameters(), *model.buffers()]}
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter.data_ptr(), []).append(name)
    return {
        "was_training": sorted({type(m).__name__ for m in model.modules() if m.training and isinstance(m, _MODAL)}),
        "weight_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        "tied": [names for names in tied.values() if len(names) > 1],
        "tied_shapes": [list(model.get_parameter(names[0]).shape) for names in tied.values() if len(names) > 1],
    }


def _called(case: Json, inputs: Json) -> Any:
    return case["model"](*_arguments(case, inputs))


def _arguments(case: Json, inputs: Json) -> tuple[Any, ...]:
    """Inputs by place; parameters of forward that lie between keep their default."""
    if not case["skipped"]:
        return tuple(inputs[name] for name in case["names"])
    parameters = inspect.signature(case["model"].forward).parameters
    order = [name for name in parameters if name in inputs or name in case["skipped"]]
    return tuple(inputs[name] if name in inputs else parameters[name].default for name in order)


def _run_example(case: Json) -> None:
    """Runs the model as given and once more for each symbol, to name the outputs and their dynamic axes."""
    symbols = {symbol for axes in case["dynamic_axes"].values() for symbol in axes.values()}
    leaves = _leaves(_called(case, case["inputs"]))
    case["unnamed_outputs"] = []
    if case["output_names"] is None:
        case["output_names"] = [name for name, _ in leaves]
        case["unnamed_outputs"] = [name for name, _ in leaves if re.fullmatch(r"output(_\d+)?(\..*)?", name)]
    elif len(case["output_names"]) != len(leaves):
        found, given = len(leaves), len(case["output_names"])
        step = f"name all of them: {', '.join(name for name, _ in leaves)}"
        raise _Wrong([_problem(f"gives {given} output_names, the model returns {found} tensors", step)])
    if clash := set(case["output_names"]) & set(case["names"]):
        step = "give output_names that are no names of inputs"
        raise _Wrong([_problem(f"has an input and an output both called '{min(clash)}'", step)])
    case["output_axes"] = {name: {} for name in case["output_names"]}
    for symbol in sorted(symbols):
        inputs = {
            name: _grown(tensor, case["dynamic_axes"].get(name, {}), symbol) for name, tensor in case["inputs"].items()
        }
        size = _size_of(case, symbol) + 1
        try:
            grown = _leaves(_called(case, inputs))
        except Exception:  # noqa: BLE001, S112 - the model may take other sizes, such as multiples of 8
            continue
        for name, (_, before), (_, after) in zip(case["output_names"], leaves, grown, strict=True):
            for axis, (old, new) in enumerate(zip(before.shape, after.shape, strict=False)):
                if (old, new) == (size - 1, size):
                    case["output_axes"][name].setdefault(axis, symbol)


def _size_of(case: Json, symbol: str) -> int:
    return next(
        int(case["inputs"][name].shape[axis])
        for name, axes in case["dynamic_axes"].items()
        for axis, its in axes.items()
        if its == symbol
    )


def _grown(tensor: Any, axes: Mapping[int, str], symbol: str) -> Any:
    """`tensor` with one entry more along each axis called `symbol`, repeating the last, so that values stay in range."""
    for axis, its in axes.items():
        if its == symbol:
            tensor = torch.cat([tensor, tensor.narrow(axis, tensor.shape[axis] - 1, 1)], dim=axis)
    return tensor


def _leaves(outputs: Any) -> list[tuple[str, Any]]:
    """Names and tensors of what a model returned, in the order in which torch flattens it.

    Raises:
        _Wrong: it holds something that is no tensor.
    """
    leaves = list(_leaves_below(outputs, ""))
    problems = [
        _problem(
            f"the model returns {_kind(value)}{name and f' as {name!r}'}, expected tensors",
            "wrap the model in a torch.nn.Module whose forward returns tensors only",
        )
        for name, value in leaves
        if not isinstance(value, torch.Tensor)
    ]
    if not leaves:
        problems = [_problem("the model returns no tensor", "return at least one tensor from forward")]
    _raise_any(problems)
    return [(name or "output", tensor) for name, tensor in leaves]


def _leaves_below(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves_below(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple | list):
        fields = getattr(value, "_fields", range(len(value)))
        for key, item in zip(fields, value, strict=True):
            yield from _leaves_below(item, f"{name}.{key}" if name else f"output_{key}")
    elif value is not None:
        yield name, value


# The export itself


def _export(case: Json, path: Path, opset: int, *, is_large: bool) -> Json:
    """Exports with the exporter that reaches the opset; with the other one where it does not."""
    dynamo = ("dynamo", _by_dynamo)
    legacy = ("torchscript", _by_torchscript)
    reasons: list[str] = []
    for name, exporter in (legacy, dynamo) if opset < _DYNAMO_MINIMUM else (dynamo, legacy):
        if name == "torchscript" and opset > _LEGACY_MAXIMUM:
            reasons.append(f"torch's TorchScript exporter ends at opset {_LEGACY_MAXIMUM}")
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                narrowed = exporter(case, path, opset, is_large)
            except Exception as error:
                if name == "dynamo" and (flow := _data_dependent(error)):
                    raise _Wrong([flow]) from error
                reasons.append(f"torch's {name} exporter stopped: {_reason(error)}")
                continue
        found = _opset_of(path)
        if found != opset:
            reasons.append(f"torch's {name} exporter wrote opset {found} where {opset} was asked for")
            continue
        if name == "torchscript" and opset < _DYNAMO_MINIMUM:
            reasons.append(
                f"torch's dynamo exporter begins at opset {_DYNAMO_MINIMUM}, so TorchScript made opset {opset}"
            )
        return {"exporter": name, "notes": reasons, "narrowed": narrowed, "traced": _traced(caught)}
    raise _Wrong(
        [
            _problem(
                f"is exported to opset {opset} by none of torch {torch.__version__}'s exporters",
                "read the reasons above; most often an operator of the model has to be replaced by simpler ones",
                *reasons,
            )
        ]
    )


def _by_torchscript(case: Json, path: Path, opset: int, _is_large: bool) -> list[str]:  # noqa: FBT001 - both alike
    axes = {**case["dynamic_axes"], **{name: axes for name, axes in case["output_axes"].items() if axes}}
    model, arguments = case["model"], _arguments(case, case["inputs"])
    if any(not isinstance(value, torch.Tensor) and value is not None for value in arguments):
        # The exporter would make inputs of numbers.
        model, arguments = _ByName(model, case["names"]), tuple(case["inputs"].values())
    torch.onnx.export(
        model,
        arguments,
        str(path),
        dynamo=False,
        input_names=case["names"],
        output_names=case["output_names"],
        opset_version=opset,
        dynamic_axes=axes,
    )
    return []


class _ByName(torch.nn.Module):  # type: ignore[misc]
    """Takes inputs by place and gives them to `model` by name."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Any) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True)))


def _by_dynamo(case: Json, path: Path, opset: int, is_large: bool) -> list[str]:  # noqa: FBT001 - both alike
    """Exports, and gives the symbols whose range the exporter narrowed, in words."""
    symbols = {symbol for axes in case["dynamic_axes"].values() for symbol in axes.values()}
    dims = {symbol: torch.export.Dim(symbol) for symbol in sorted(symbols)}
    axes = {
        name: {axis: dims[symbol] for axis, symbol in case["dynamic_axes"].get(name, {}).items()}
        for name in case["names"]
    }
    by_name = bool(case["skipped"])
    program = torch.onnx.export(
        case["model"],
        () if by_name else tuple(case["inputs"].values()),
        kwargs=case["inputs"] if by_name else None,
        input_names=case["names"],
        output_names=case["output_names"],
        opset_version=opset,
        dynamic_shapes=axes if by_name else tuple(axes.values()),
        dynamo=True,
        verbose=False,
    )
    program.save(str(path), external_data=is_large)
    return _narrowed(program.exported_program, case)


def _narrowed(program: Any, case: Json) -> list[str]:
    """Sizes that the exporter assumed because a branch of the model's own depends on them, such as `seq > 4`."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [
        values[name] for name in program.graph_signature.user_inputs if isinstance(values.get(name), torch.Tensor)
    ]
    known = {
        str(value.shape[axis]): symbol
        for name, value in zip(case["names"], inputs, strict=False)
        for axis, symbol in case["dynamic_axes"].get(name, {}).items()
    }
    words = []
    for symbol, allowed in program.range_constraints.items():
        low, high = str(allowed.lower), str(allowed.upper)
        if str(symbol) in known and (low not in ("0", "1", "2") or "oo" not in high):
            most = "" if "oo" in high else f", at most {high}"
            words.append(
                f"the exporter took '{known[str(symbol)]}' to be at least {low}{most}: the model branches on it"
            )
    return words


def _opset_of(path: Path) -> int:
    import onnx  # noqa: PLC0415 - only the newer exporter needs it, and its own message is better than an early one

    model = onnx.load(str(path), load_external_data=False)
    return max((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def _traced(caught: list[warnings.WarningMessage]) -> list[list[Any]]:
    """Each place where tracing turned a value of a tensor into a constant: file, line, the warning's first sentence."""
    found: dict[tuple[str, int], str] = {}
    for warning in caught:
        if issubclass(warning.category, torch.jit.TracerWarning):
            sentence = str(warning.message).partition(". ")[0]
            found.setdefault((warning.filename, warning.lineno), sentence)
    return [[file, line, sentence] for (file, line), sentence in found.items()]


def _data_dependent(error: BaseException) -> Json | None:
    """The problem, where `error` is about control flow that depends on the values of tensors."""
    chain: BaseException | None = error
    while chain is not None:
        if type(chain).__name__ == "GuardOnDataDependentSymNode":
            text = str(chain)
            problem = _problem(
                "takes a branch that depends on the values of a tensor, which would be frozen as it went for the example",
                "compute both sides and choose with torch.where, or use torch.cond",
            )
            places = re.findall(r'File "([^"]+)", line (\d+)', text)
            return {**problem, "places": [[file, int(line)] for file, line in places[-1:]]}
        chain = chain.__cause__ or chain.__context__
    return None


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: the exporter's own text is a page of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:500]}"
