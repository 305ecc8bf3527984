"""One execution context of an engine, in one profile, with its stream and its memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from trtforge.cuda import Bytes, Cuda
from trtforge.errors import CapabilityError, GraphError
from trtforge.types import Shape

Array = np.ndarray[Any, np.dtype[Any]]

_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP8": np.dtype(ml_dtypes.float8_e4m3fn),
    "INT8": np.dtype(np.int8),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
}
"""TensorRT's element types by name. Source: enum DataType of NvInferRuntimeBase.h, 8.6 to 11."""


_SHOWN_LINES: Final = 5


@dataclass(slots=True, eq=False)
class _Memory:
    """A tensor's memory on both sides; it grows and never shrinks."""

    device: int
    host: Bytes


@dataclass(slots=True, eq=False)
class _Beside:
    """Streams for copies, and the events by which they and the compute wait for each other."""

    into: int
    out: int
    copied: Any
    computed: Any
    end: Any


class Lane:
    """Runs an engine in one of its profiles, one request at a time. Not for several threads at once.

    Attributes:
        input_names, output_names: in the engine's order.
        stream: in which everything happens.
    """

    def __init__(
        self,
        trt: Any,
        engine: Any,
        cuda: Cuda,
        profile_index: int,
        log: list[str],
        *,
        remembers_sizes: bool,
        beside: Lane | None = None,
    ) -> None:
        """Makes a context.

        Args:
            trt: TensorRT's module.
            engine: of it.
            cuda: where memory and streams come from.
            profile_index: of the engine's profiles.
            log: lines of TensorRT's log, in which it says why it refuses.
            remembers_sizes: whether a context that has run takes the sizes of outputs for known, see `_set_allocator`.
            beside: a lane whose stream this one shares, so that they compute by turns.

        Raises:
            CapabilityError: the GPU has no memory for it, or the engine allows no second context of a profile.
        """
        self._trt, self._engine, self._cuda, self._profile_index, self._log = trt, engine, cuda, profile_index, log
        self._remembers_sizes = remembers_sizes
        self._memory: dict[str, _Memory] = {}
        self._allocators: dict[str, Any] = {}
        self._shapes: dict[str, Shape] = {}
        self._graphs: dict[bool, Any] = {}
        self._beside: _Beside | None = None
        self._is_ready = False
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        is_input = {name: engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
        self.input_names = tuple(name for name in names if is_input[name])
        self.output_names = tuple(name for name in names if not is_input[name])
        self._types = {name: _type(name, engine.get_tensor_dtype(name).name) for name in names}
        self._on_host = {name for name in names if engine.get_tensor_location(name) == trt.TensorLocation.HOST}
        self._context = self._new_context()
        self.stream: int = cuda.stream() if beside is None else beside.stream
        self._owns_stream = beside is None
        try:
            self._choose_profile()
        except CapabilityError:
            self.close()
            raise

    def dtype(self, name: str) -> np.dtype[Any]:
        """Element type of an input or output."""
        return self._types[name]

    @property
    def sized_by_data(self) -> tuple[str, ...]:
        """Outputs whose sizes are known only after a run, after `prepare`."""
        return tuple(self._allocators)

    def prepare(self, feeds: Mapping[str, Array]) -> None:
        """Takes the inputs of the next runs into page-locked memory, and makes room for the outputs.

        Args:
            feeds: input name -> array of the engine's type, of sizes that this profile allows.

        Raises:
            GraphError: the engine's integers do not hold a value.
            CapabilityError: TensorRT does not take a shape, or memory is short.
        """
        arrays = {name: _converted(name, feeds[name], self._types[name]) for name in self.input_names}
        if self._is_ready and self._asks_the_same(arrays):
            for name, array in arrays.items():
                self._fill(name, array)
            return
        self._forget_graphs()  # Source: TensorRT developer guide: changing a context makes its recorded graphs undefined
        self._is_ready = False
        self._log.clear()
        if self._allocators and self._remembers_sizes:
            self._context = None  # whose memory the next one takes
            self._context = self._new_context()
            self._choose_profile()
        for name, array in arrays.items():
            self._set_input(name, array)
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise CapabilityError(
                f"TensorRT finds no shapes of the outputs: {error}",
                detail=self._log[-_SHOWN_LINES:],
                next_step="give sizes that the model allows",
            ) from error
        if missing:
            raise CapabilityError(f"the engine still misses {', '.join(missing)}", next_step="give every input")
        for name in self.output_names:
            self._set_output(name)
        self._is_ready = True

    def copy_in(self, stream: int | None = None) -> None:
        """Puts the copies of all inputs to the GPU into the lane's stream, or another."""
        for name in self.input_names:
            if name not in self._on_host and 0 not in self._shapes[name]:
                self._cuda.to_device(self._memory[name].device, self._part(name), stream or self.stream)

    def enqueue(self) -> None:
        """Puts the engine into the stream.

        Raises:
            CapabilityError: TensorRT refused.
        """
        self._log.clear()
        for allocator in self._allocators.values():
            allocator.error = None
        if self._context.execute_async_v3(self.stream):
            return
        for allocator in self._allocators.values():
            if allocator.error is not None:
                raise allocator.error
        raise self._refusal("TensorRT did not start the engine")

    def copy_out(self, stream: int | None = None) -> None:
        """Puts the copies of all outputs of known size to the host into the lane's stream, or another."""
        for name in self.output_names:
            if name not in self._on_host and name not in self._allocators and 0 not in self._shapes[name]:
                self._cuda.to_host(self._part(name), self._memory[name].device, stream or self.stream)

    def run(self, *, with_graph: bool = False) -> None:
        """Copies in, runs, copies out and waits. With `with_graph`, all of it as one recorded CUDA graph."""
        if with_graph:
            self._cuda.launch(self.graph(transfers=True), self.stream)
        else:
            self.copy_in()
            self.enqueue()
            self.copy_out()
        self._cuda.synchronize(self.stream)

    def start(self) -> None:
        """Copies in, runs and copies out; `finish` waits for it.

        Copies are in streams of their own, so that they overlap the compute of a lane that shares this one's stream.
        """
        cuda = self._cuda
        beside = self._beside = self._beside or _beside(cuda)
        self.copy_in(beside.into)
        cuda.record(beside.copied, beside.into)
        cuda.hold(self.stream, beside.copied)
        self.enqueue()
        cuda.record(beside.computed, self.stream)
        cuda.hold(beside.out, beside.computed)
        self.copy_out(beside.out)
        cuda.record(beside.end, beside.out)

    def finish(self) -> dict[str, Array]:
        """The outputs of what was started last, as copies."""
        assert self._beside is not None  # noqa: S101 - the caller started it
        self._cuda.wait_for(self._beside.end)
        return self.outputs()

    def outputs(self) -> dict[str, Array]:
        """The outputs of the last run, as copies. Waits for those whose sizes depend on the data."""
        return {name: self._output(name) for name in self.output_names}

    def graph(self, *, transfers: bool) -> Any:
        """The CUDA graph of what is prepared, recorded where there is none yet. `prepare` with other shapes ends it.

        Raises:
            CapabilityError: sizes of an output depend on the data, or the CUDA library records no graphs.
        """
        if self._allocators:
            raise CapabilityError(
                f"the size of output '{next(iter(self._allocators))}' depends on the data, so it fits no CUDA graph",
                next_step="run without CUDA graph",
            )
        if transfers not in self._graphs:
            self.copy_in()
            self.enqueue()  # lazy set-up of the kernels may not be recorded
            self._cuda.synchronize(self.stream)
            self._graphs[transfers] = self._recorded(transfers=transfers)
        return self._graphs[transfers]

    def show(self, inspector: Any) -> None:
        """Lets TensorRT's inspector see this context, without which it tells no types of open sizes."""
        inspector.execution_context = self._context

    def close(self) -> None:
        """Gives graphs, context, memory and stream back, once the GPU is done with them."""
        with ExitStack() as steps:  # from the last one on; whatever one raises, the others follow
            if self._owns_stream:
                steps.callback(self._cuda.free_stream, self.stream)
            if beside := self._beside:
                for stream in (beside.into, beside.out):
                    steps.callback(self._cuda.free_stream, stream)
                for event in (beside.copied, beside.computed, beside.end):
                    steps.callback(self._cuda.free_event, event)
            for allocator in self._allocators.values():
                steps.callback(allocator.close)
            for memory in self._memory.values():
                steps.callback(self._cuda.free_host, memory.host)
                steps.callback(self._cuda.free, memory.device)
            steps.callback(setattr, self, "_engine", None)
            steps.callback(setattr, self, "_context", None)
            steps.callback(self._forget_graphs)
            with suppress(CapabilityError):  # what stopped the GPU was told to whoever waited for it
                for stream in (self.stream, *((self._beside.out,) if self._beside else ())):
                    self._cuda.synchronize(stream)

    def _new_context(self) -> Any:
        self._log.clear()  # what it says of something else is no reason
        context = self._engine.create_execution_context()
        if context is None:
            free, total = self._cuda.memory()
            raise CapabilityError(
                f"an execution context needs {context_bytes(self._engine) / 2**20:.1f} MiB of GPU memory, "
                f"and {free / 2**20:.1f} MiB of {total / 2**20:.1f} MiB are free",
                detail=self._log[-_SHOWN_LINES:],
                next_step="nvidia-smi  # shows what else uses the GPU",
            )
        return context

    def _choose_profile(self) -> None:
        if not self._context.set_optimization_profile_async(self._profile_index, self.stream):
            raise CapabilityError(
                "TensorRT gives a second context of the same profile only to engines that were built for it",
                detail=self._log[-_SHOWN_LINES:],
                next_step="use 1 stream and --one-at-a-time, or build the engine again with this version of trtforge",
            )
        self._cuda.synchronize(self.stream)

    def _recorded(self, *, transfers: bool) -> Any:
        self._cuda.begin_capture(self.stream)
        try:
            if transfers:
                self.copy_in()
            self.enqueue()
            if transfers:
                self.copy_out()
        except CapabilityError:
            with suppress(CapabilityError):
                self._cuda.free_graph(self._cuda.end_capture(self.stream))
            raise
        return self._cuda.end_capture(self.stream)

    def _forget_graphs(self) -> None:
        while self._graphs:
            self._cuda.free_graph(self._graphs.popitem()[1])

    def _asks_the_same(self, arrays: Mapping[str, Array]) -> bool:
        """Whether the context needs no change: the same shapes, and the same values where those decide shapes."""
        return all(
            self._shapes[name] == array.shape
            and (name not in self._on_host or np.array_equal(self._part(name), _bytes(array)))
            for name, array in arrays.items()
        )

    def _fill(self, name: str, array: Array) -> None:
        self._memory[name].host[: array.nbytes] = _bytes(array)

    def _set_input(self, name: str, array: Array) -> None:
        self._make_room(name, array.nbytes)
        self._fill(name, array)
        self._set_address(name)
        if not self._context.set_input_shape(name, array.shape):
            raise self._refusal(f"TensorRT does not take {list(array.shape)} for input '{name}'")
        self._shapes[name] = array.shape

    def _refusal(self, what: str) -> CapabilityError:
        """With TensorRT's own last words."""
        if is_out_of_memory(self._log):
            free, total = self._cuda.memory()
            asked = _asked_bytes(self._log)
            return CapabilityError(
                f"{what}: {free / 2**20:.1f} MiB of {total / 2**20:.1f} MiB of GPU memory are free, and it needs "
                + (f"{asked / 2**20:.1f} MiB" if asked else "more"),
                detail=self._log[-_SHOWN_LINES:],
                next_step="nvidia-smi  # shows what else uses the GPU",
            )
        return CapabilityError(what, detail=self._log[-_SHOWN_LINES:], next_step="trtforge doctor")

    def _set_output(self, name: str) -> None:
        shape = tuple(self._context.get_tensor_shape(name))
        if name in self._allocators or any(size < 0 for size in shape):
            self._set_allocator(name)
            return
        self._make_room(name, math.prod(shape) * self._types[name].itemsize)
        self._set_address(name)
        self._shapes[name] = shape

    def _set_allocator(self, name: str) -> None:
        """Lets TensorRT ask for the memory of an output that is sized by the data.

        Seen with 8.6: a context that has run tells that run's sizes in place of -1, and asks for less memory than the next
        run takes. So it is replaced for other shapes, and the output has what it can take at most.
        """
        is_new = name not in self._allocators
        if is_new:
            self._allocators[name] = _growing(self._trt, self._cuda)
        if self._remembers_sizes:
            self._allocators[name].least = self._context.get_max_output_size(name)
        if is_new or self._remembers_sizes:
            self._context.set_output_allocator(name, self._allocators[name])

    def _set_address(self, name: str) -> None:
        memory = self._memory[name]
        self._context.set_tensor_address(name, memory.host.ctypes.data if name in self._on_host else memory.device)

    def _make_room(self, name: str, num_bytes: int) -> None:
        size = max(num_bytes, 1)  # CUDA has no memory of 0 bytes
        if name in self._memory and self._memory[name].host.nbytes >= size:
            return
        if name in self._memory:
            memory = self._memory.pop(name)
            self._cuda.free(memory.device)
            self._cuda.free_host(memory.host)
        device = self._cuda.allocate(size)
        try:
            self._memory[name] = _Memory(device, self._cuda.allocate_host(size))
        except CapabilityError:
            self._cuda.free(device)
            raise

    def _part(self, name: str) -> Bytes:
        return self._memory[name].host[: math.prod(self._shapes[name]) * self._types[name].itemsize]

    def _output(self, name: str) -> Array:
        if name not in self._allocators:
            return self._part(name).copy().view(self._types[name]).reshape(self._shapes[name])
        allocator, dtype = self._allocators[name], self._types[name]
        num_bytes = math.prod(allocator.shape) * dtype.itemsize
        if num_bytes > allocator.size:
            raise CapabilityError(
                f"TensorRT asked for {allocator.size} bytes for output '{name}', and says it has {num_bytes}",
                next_step="build with another TensorRT version, or give the output a size that is known beforehand",
            )
        host = self._cuda.allocate_host(max(num_bytes, 1))
        try:
            if num_bytes:
                self._cuda.to_host(host, allocator.pointer, self.stream)
                self._cuda.synchronize(self.stream)
            return host[:num_bytes].copy().view(dtype).reshape(allocator.shape)
        finally:
            self._cuda.free_host(host)


def is_out_of_memory(log: list[str]) -> bool:
    """Whether TensorRT says so in lines of its log."""
    return any("out of memory" in line.lower() or "outofmemory" in line.lower() for line in log)


def _asked_bytes(log: list[str]) -> int:
    """The largest memory that TensorRT says it did not get; 0 where it names none.

    Source: logs in issues 3017 (8.6) and 4254 (10.x) of NVIDIA/TensorRT.
    """
    asked = re.findall(r"Requested (?:amount of GPU memory \(|size was )(\d+) bytes", "\n".join(log))
    return max(map(int, asked), default=0)


def context_bytes(engine: Any) -> int:
    """GPU memory that one execution context of an engine takes; TensorRT 11 knows only the newer name."""
    newer = getattr(engine, "device_memory_size_v2", None)
    return int(engine.device_memory_size if newer is None else newer)


def _type(name: str, dtype: str) -> np.dtype[Any]:
    if dtype not in _TYPES:
        raise CapabilityError(
            f"tensor '{name}' is {dtype}, which no numpy array holds", next_step="cast it in the model, and build again"
        )
    return _TYPES[dtype]


def _converted(name: str, values: Array, dtype: np.dtype[Any]) -> Array:
    array = np.asarray(values)
    with np.errstate(invalid="ignore"):  # what does not fit is refused
        converted = array.astype(dtype, order="C", copy=False)
    is_sure = dtype.kind not in "iu" or np.can_cast(array.dtype, dtype)
    if not is_sure and not np.array_equal(array, converted):
        raise GraphError(
            f"input '{name}' is {dtype} in the engine, and holds values from {array.min()} to {array.max()}",
            next_step="give values that fit, or keep this part outside the engine",
        )
    return converted


def _bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _beside(cuda: Cuda) -> _Beside:
    with ExitStack() as made:
        streams, events = [], []
        for _ in range(2):
            streams.append(cuda.stream())
            made.callback(cuda.free_stream, streams[-1])
        for _ in range(3):
            events.append(cuda.event(spin=False))
            made.callback(cuda.free_event, events[-1])
        made.pop_all()
    return _Beside(*streams, *events)


def _growing(trt: Any, cuda: Cuda) -> Any:
    """An output allocator, for an output whose size is known only after the run."""

    class Growing(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.pointer, self.size, self.shape = 0, 0, ()
            self.least = 1  # bytes that are taken, however little is asked for
            self.error: CapabilityError | None = None

        def reallocate_output(self, _name: str, _memory: int, size: int, _alignment: int) -> int:
            wanted = max(size, self.least, 1)
            if wanted > self.size:
                try:
                    self.close()
                    self.pointer = cuda.allocate(wanted)
                except CapabilityError as error:  # an exception may not pass through TensorRT; no memory is its answer
                    self.error = error
                    return 0
                self.size = wanted
            return self.pointer

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, _stream: int) -> int:
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, _name: str, shape: Any) -> None:
            self.shape = tuple(shape)

        def close(self) -> None:
            pointer, self.pointer, self.size = self.pointer, 0, 0
            if pointer:
                cuda.free(pointer)

    return Growing()
