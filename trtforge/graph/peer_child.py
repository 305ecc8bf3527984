"""The child side of a peer: measures a torch model, in the user's interpreter, as an engine is measured.

A driver of `trtforge.usercode.child`. latency, compute, copies, enqueue and response are those of
`trtforge.runtime.measure`, all in one stream: copies between page-locked memory and the GPU, the same number of
queries under way. On the CPU the host's clock takes the place of the events. TF32 is off.
"""

from __future__ import annotations

import runpy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Json = dict[str, Any]
Tell = Callable[[str], None]

_EXPORT = runpy.run_path(str(Path(__file__).with_name("export_child.py")))
_DEPTH = 2
_ROUND = 10
_MOST_ROUNDS = 100
_SETTLED = 0.1
"""Relative difference of two rounds' medians below which nothing is compiled or tuned any more."""


def measure(function: Callable[[], Any], payload: Json, state: Json, tell: Tell) -> Json:
    """Runs the model that `function` returns on `payload["feeds"]`, again and again.

    Args:
        function: the user's.
        payload: `feeds`, input name -> array; `half`, whether weights and inputs are float16; `mode` of torch.compile, ""
            for eager; `device`; and of the switches `transfers`, `spin_wait`, `one_at_a_time`, `warm_up_ms`,
            `duration_s`, `iterations`.
        state: keeps the model for the next sizes.
        tell: takes what is done now.

    Returns:
        `rows`, an array (queries, 5) of ms: copy in, compute, copy out, enqueue, response; `wall_s`; `ready_seconds`, until
        the first query had ended; `is_settled`; `torch` and `device`, what ran it.

    Raises:
        ValueError: the model has other inputs.
    """
    device = torch.device(payload["device"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "case" not in state:
        tell("making the model")
        state["case"] = _case(function, payload, device)
    case = state["case"]
    with torch.inference_mode():
        torch.compiler.reset()  # beyond 8 sizes torch.compile would fall back to eager without a word
        run = torch.compile(case["model"], dynamic=False, mode=payload["mode"]) if payload["mode"] else case["model"]
        query = _Query(run, case, _inputs(case, payload, device), device, with_copies=payload["transfers"])
        tell("warming up")
        begin = time.perf_counter()
        query.prepare()
        ready = time.perf_counter() - begin
        is_settled = _warm_up(query, payload)
        tell("measuring")
        rows, wall = _measured(query, payload)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = {"torch": torch.__version__, "device": name, "is_settled": is_settled, "ready_seconds": ready}
    return {"rows": torch.tensor(rows, dtype=torch.float64).numpy(), "wall_s": wall, **facts}


def _case(function: Callable[[], Any], payload: Json, device: Any) -> Any:
    try:
        with torch.no_grad():
            case = _EXPORT["_case"](function())
    except _EXPORT["_Wrong"] as wrong:
        raise ValueError(f"the function {wrong}") from None
    model = case["model"].eval().to(device)
    return {**case, "model": model.half() if payload["half"] else model}


def _inputs(case: Json, payload: Json, device: Any) -> Json:
    """Input name -> tensor on the host, page-locked where there is a GPU, of the type that the model takes."""
    if set(case["names"]) != set(payload["feeds"]):
        found, expected = ", ".join(case["names"]), ", ".join(payload["feeds"])
        raise ValueError(f"the model has the inputs {found}, the engine has {expected}")
    made = {}
    for name in case["names"]:
        example = case["inputs"][name]
        dtype = torch.float16 if payload["half"] and example.is_floating_point() else example.dtype
        tensor = _EXPORT["_to_torch"](payload["feeds"][name]).to(dtype)
        made[name] = tensor.pin_memory() if device.type == "cuda" else tensor
    return made


class _HostEvent:
    """torch.cuda.Event where everything happens at once."""

    at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end.at - self.at) * 1000


class _Query:
    """A model with its inputs and outputs on both sides."""

    def __init__(self, run: Any, case: Json, given: Json, device: Any, *, with_copies: bool) -> None:
        self._run, self._given, self._with_copies = run, given, with_copies
        self._is_compiled = run is not case["model"]
        self._is_on_gpu = device.type == "cuda"
        self._inputs = {name: tensor.to(device, copy=True) for name, tensor in given.items()}
        # Asked of the model itself, since a compiled one has another signature.
        self._arguments = _EXPORT["_arguments"](case, self._inputs)
        self._outputs: list[Any] = []
        self._held: list[Any] = []

    def prepare(self) -> None:
        """Runs once, and makes room for the outputs on the host."""
        self.compute()
        self._held = [torch.empty(one.shape, dtype=one.dtype, pin_memory=self._is_on_gpu) for one in self._outputs]
        if self._is_on_gpu:
            torch.cuda.synchronize()

    def copy_in(self) -> None:
        if self._with_copies:
            for name, tensor in self._given.items():
                self._inputs[name].copy_(tensor, non_blocking=True)

    def compute(self) -> None:
        if self._is_compiled:
            torch.compiler.cudagraph_mark_step_begin()  # the last query's outputs may be overwritten
        self._outputs = [tensor for _, tensor in _EXPORT["_leaves"](self._run(*self._arguments))]

    def copy_out(self) -> None:
        if self._with_copies:
            for target, output in zip(self._held, self._outputs, strict=True):
                target.copy_(output, non_blocking=True)

    def event(self, *, spin: bool) -> Any:
        return torch.cuda.Event(enable_timing=True, blocking=not spin) if self._is_on_gpu else _HostEvent()


@dataclass
class _Slot:
    """A query that is under way."""

    events: list[Any]
    began: float = 0.0
    enqueue_ms: float = 0.0
    is_pending: bool = False

    def start(self, query: _Query) -> None:
        self.began = time.perf_counter()
        self.events[0].record()
        query.copy_in()
        self.events[1].record()
        before = time.perf_counter()
        query.compute()
        self.enqueue_ms = (time.perf_counter() - before) * 1000
        self.events[2].record()
        query.copy_out()
        self.events[3].record()
        self.is_pending = True

    def finish(self) -> tuple[float, ...]:
        """Waits for it and gives its times."""
        self.events[3].synchronize()
        response = (time.perf_counter() - self.began) * 1000
        self.is_pending = False
        between = [one.elapsed_time(other) for one, other in zip(self.events, self.events[1:], strict=False)]
        return (*between, self.enqueue_ms, response)


def _warm_up(query: _Query, payload: Json) -> bool:
    """Runs until rounds take the same time and the warm-up is over. Returns whether they came to take the same time."""
    slot = _Slot([query.event(spin=payload["spin_wait"]) for _ in range(4)])
    end = time.perf_counter() + payload["warm_up_ms"] / 1000
    before = 0.0
    rounds_left = _MOST_ROUNDS
    while rounds_left:
        times = []
        for _ in range(_ROUND):
            slot.start(query)
            times.append(slot.finish()[-1])
        median = statistics.median(times)
        is_settled = abs(median - before) <= _SETTLED * median
        if time.perf_counter() >= end:
            if is_settled:
                return True
            rounds_left -= 1
        before = median
    return False


def _measured(query: _Query, payload: Json) -> tuple[list[tuple[float, ...]], float]:
    depth = 1 if payload["one_at_a_time"] else _DEPTH
    slots = [_Slot([query.event(spin=payload["spin_wait"]) for _ in range(4)]) for _ in range(depth)]
    rows: list[tuple[float, ...]] = []
    begin = time.perf_counter()
    while True:
        for slot in slots:
            if slot.is_pending:
                rows.append(slot.finish())
            if time.perf_counter() - begin < payload["duration_s"] or len(rows) < payload["iterations"]:
                slot.start(query)
        if not any(slot.is_pending for slot in slots):
            return rows, time.perf_counter() - begin
