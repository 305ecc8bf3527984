"""The little of CUDA that trtforge needs, through pycuda or cuda-python, whichever is installed."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np

from trtforge.errors import CapabilityError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_INSTALL: Final = "pip install 'trtforge[gpu-wheels]'"
_OUT_OF_MEMORY: Final = 2
"""cudaErrorMemoryAllocation. Source: CUDA runtime API, enum cudaError."""
_PINNED: Final = 0
_KINDS: Final = {"to_device": 1, "to_host": 2}
"""Source: CUDA runtime API, enum cudaMemcpyKind."""
_BLOCKING_SYNC: Final = 1
"""Source: CUDA runtime API, cudaEventBlockingSync."""
_NON_BLOCKING: Final = 1
"""Does not wait for the default stream. Source: CUDA runtime API, cudaStreamNonBlocking."""
_CAPTURE_THREAD_LOCAL: Final = 1
"""Other threads may go on allocating. Source: CUDA runtime API, enum cudaStreamCaptureMode."""


class Cuda(Protocol):
    """One GPU. Pointers, streams, events and graphs are CUDA's own handles as integers, except for graphs and events.

    Every method raises `CapabilityError` with CUDA's reason; memory that is not to be had names what was needed and
    what was free. The device's primary context is used, so that other libraries of the process share it.
    """

    name: str
    """The library that does it, with its version."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the GPU."""

    def allocate(self, num_bytes: int) -> int:
        """Device memory."""

    def free(self, pointer: int) -> None:
        """Gives device memory back."""

    def allocate_host(self, num_bytes: int) -> Bytes:
        """Page-locked host memory, from which copies overlap with compute."""

    def free_host(self, memory: Bytes) -> None:
        """Gives host memory back; the array must not be used again."""

    def stream(self) -> int:
        """A new stream that does not wait for the default one."""

    def free_stream(self, stream: int) -> None:
        """Gives a stream back."""

    def to_device(self, pointer: int, memory: Bytes, stream: int) -> None:
        """Copies page-locked memory to the device, in stream order."""

    def to_host(self, memory: Bytes, pointer: int, stream: int) -> None:
        """Copies device memory to page-locked memory, in stream order."""

    def synchronize(self, stream: int) -> None:
        """Waits for everything in a stream."""

    def event(self, *, spin: bool) -> Any:
        """A new event that takes time; whoever waits for it keeps a processor busy (`spin`) or sleeps."""

    def free_event(self, event: Any, /) -> None:
        """Gives an event back."""

    def record(self, event: Any, stream: int) -> None:
        """Marks this point of a stream."""

    def wait_for(self, event: Any) -> None:
        """Waits until an event has happened."""

    def hold(self, stream: int, event: Any) -> None:
        """Lets what is put into a stream from now on wait for an event of another."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two events that have happened."""

    def begin_capture(self, stream: int, /) -> None:
        """Records what is put into a stream from now on, instead of running it."""

    def end_capture(self, stream: int, /) -> Any:
        """Ends the recording: a graph that can be launched."""

    def launch(self, graph: Any, stream: int, /) -> None:
        """Puts a recorded graph into a stream."""

    def free_graph(self, graph: Any, /) -> None:
        """Gives a graph back."""

    def close(self) -> None:
        """Leaves the GPU's context to the rest of the process; nothing else may be called afterwards."""


def open_cuda(library: str | None = None, device: int = 0) -> Cuda:
    """The GPU `device` through `library` ("cuda-python" or "pycuda"), or through the first of the two that is installed.

    Raises:
        CapabilityError: neither library is installed, or there is no GPU that it can use.
    """
    missing = []
    if library not in (None, *_LIBRARIES):
        raise CapabilityError(f"found CUDA library '{library}'", next_step=f"name one of: {', '.join(_LIBRARIES)}")
    for name, implementation in _LIBRARIES.items():
        if library in (None, name):
            try:
                return implementation(device)
            except ImportError as error:
                missing.append(f"{name}: {error}")
    raise CapabilityError(
        f"no CUDA library for Python is installed, expected {library or ' or '.join(_LIBRARIES)}",
        detail=missing,
        next_step=_INSTALL,
    )


def _out_of_memory(num_bytes: int, where: str, memory: tuple[int, int] | None) -> CapabilityError:
    free = f"{memory[0] / 2**20:.1f} MiB of {memory[1] / 2**20:.1f} MiB are free" if memory else "it has no more"
    return CapabilityError(
        f"{num_bytes / 2**20:.1f} MiB of {where} are needed, and {free}",
        next_step="nvidia-smi  # shows what else uses the GPU" if memory else "free -m",
    )


class _CudaPython:
    """Through the runtime API of cuda-python, 12.6 or later."""

    def __init__(self, device: int) -> None:
        try:
            runtime = importlib.import_module("cuda.bindings.runtime")
        except ModuleNotFoundError:
            runtime = importlib.import_module("cuda.cudart")
        self._api: Any = runtime
        try:
            self._call("cudaSetDevice", device)
        except RuntimeError as error:  # how cuda-python says that there is no driver library
            raise CapabilityError(f"CUDA does not start: {error}", next_step="trtforge doctor") from error
        self._call("cudaFree", 0)  # makes the primary context
        self.name = f"cuda-python, CUDA runtime {self._call('cudaRuntimeGetVersion')}"

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *results = getattr(self._api, function)(*arguments)
        if int(status) != 0:
            raise self._stopped(function, status)
        return results[0] if len(results) == 1 else tuple(results)

    def _stopped(self, function: str, status: Any) -> CapabilityError:
        self._api.cudaGetLastError()  # else the next call reports it again
        _, text = self._api.cudaGetErrorString(status)
        reason = f"{status.name} ({int(status)}), {text.decode()}"
        return CapabilityError(f"CUDA stopped at {function}: {reason}", next_step="trtforge doctor")

    def memory(self) -> tuple[int, int]:
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def allocate(self, num_bytes: int) -> int:
        status, pointer = self._api.cudaMalloc(num_bytes)
        if int(status) == _OUT_OF_MEMORY:
            self._api.cudaGetLastError()  # else the next call reports it again
            raise _out_of_memory(num_bytes, "GPU memory", self.memory())
        if int(status) != 0:
            raise self._stopped("cudaMalloc", status)
        return int(pointer)

    def free(self, pointer: int) -> None:
        self._call("cudaFree", pointer)

    def allocate_host(self, num_bytes: int) -> Bytes:
        status, pointer = self._api.cudaHostAlloc(num_bytes, _PINNED)
        if int(status) == _OUT_OF_MEMORY:
            self._api.cudaGetLastError()
            raise _out_of_memory(num_bytes, "page-locked memory", None)
        if int(status) != 0:
            raise self._stopped("cudaHostAlloc", status)
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(int(pointer)))

    def free_host(self, memory: Bytes) -> None:
        self._call("cudaFreeHost", memory.ctypes.data)

    def stream(self) -> int:
        return int(self._call("cudaStreamCreateWithFlags", _NON_BLOCKING))

    def free_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def to_device(self, pointer: int, memory: Bytes, stream: int) -> None:
        self._copy(pointer, memory.ctypes.data, memory.nbytes, "to_device", stream)

    def to_host(self, memory: Bytes, pointer: int, stream: int) -> None:
        self._copy(memory.ctypes.data, pointer, memory.nbytes, "to_host", stream)

    def _copy(self, target: int, source: int, num_bytes: int, kind: str, stream: int) -> None:
        self._call("cudaMemcpyAsync", target, source, num_bytes, self._api.cudaMemcpyKind(_KINDS[kind]), stream)

    def synchronize(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", stream)

    def event(self, *, spin: bool) -> Any:
        return self._call("cudaEventCreateWithFlags", 0 if spin else _BLOCKING_SYNC)

    def free_event(self, event: Any) -> None:
        self._call("cudaEventDestroy", event)

    def record(self, event: Any, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def wait_for(self, event: Any) -> None:
        self._call("cudaEventSynchronize", event)

    def hold(self, stream: int, event: Any) -> None:
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(self._call("cudaEventElapsedTime", start, end))

    def begin_capture(self, stream: int) -> None:
        self._call("cudaStreamBeginCapture", stream, self._api.cudaStreamCaptureMode(_CAPTURE_THREAD_LOCAL))

    def end_capture(self, stream: int) -> Any:
        graph = self._call("cudaStreamEndCapture", stream)
        try:
            return self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: Any, stream: int) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def free_graph(self, graph: Any) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def close(self) -> None:
        pass  # the runtime's primary context is everybody's


class _PyCuda:
    """Through pycuda, in the device's primary context. pycuda records no graphs."""

    def __init__(self, device: int) -> None:
        self._driver: Any = importlib.import_module("pycuda.driver")
        self.name = f"pycuda {importlib.metadata.version('pycuda')}"
        self._call("cuInit", self._driver.init)
        self._context = self._call(
            "cuDevicePrimaryCtxRetain", lambda: self._driver.Device(device).retain_primary_context()
        )
        self._context.push()
        # pycuda aborts the process if a context is still pushed when the interpreter exits.
        atexit.register(self._leave)
        self._allocations: dict[int, Any] = {}
        self._streams: dict[int, Any] = {}

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._driver.Error as error:
            raise CapabilityError(f"CUDA stopped at {what}: {error}", next_step="trtforge doctor") from error

    def memory(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo", self._driver.mem_get_info)
        return int(free), int(total)

    def allocate(self, num_bytes: int) -> int:
        try:
            memory = self._call("cuMemAlloc", self._driver.mem_alloc, num_bytes)
        except CapabilityError as error:
            if isinstance(error.__cause__, self._driver.MemoryError):
                raise _out_of_memory(num_bytes, "GPU memory", self.memory()) from None
            raise
        self._allocations[int(memory)] = memory
        return int(memory)

    def free(self, pointer: int) -> None:
        self._call("cuMemFree", self._allocations.pop(pointer).free)

    def allocate_host(self, num_bytes: int) -> Bytes:
        try:
            memory: Bytes = self._call("cuMemHostAlloc", self._driver.pagelocked_empty, (num_bytes,), np.uint8)
        except CapabilityError as error:
            if isinstance(error.__cause__, self._driver.MemoryError):
                raise _out_of_memory(num_bytes, "page-locked memory", None) from None
            raise
        return memory

    def free_host(self, memory: Bytes) -> None:
        self._call("cuMemFreeHost", memory.base.free)  # type: ignore[union-attr]

    def stream(self) -> int:
        stream = self._call("cuStreamCreate", self._driver.Stream, _NON_BLOCKING)
        self._streams[int(stream.handle)] = stream
        return int(stream.handle)

    def free_stream(self, stream: int) -> None:
        del self._streams[stream]

    def to_device(self, pointer: int, memory: Bytes, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", self._driver.memcpy_htod_async, pointer, memory, self._streams[stream])

    def to_host(self, memory: Bytes, pointer: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", self._driver.memcpy_dtoh_async, memory, pointer, self._streams[stream])

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", self._streams[stream].synchronize)

    def event(self, *, spin: bool) -> Any:
        return self._call("cuEventCreate", self._driver.Event, 0 if spin else _BLOCKING_SYNC)

    def free_event(self, _event: Any) -> None:
        pass  # pycuda does, with the last reference

    def record(self, event: Any, stream: int) -> None:
        self._call("cuEventRecord", event.record, self._streams[stream])

    def wait_for(self, event: Any) -> None:
        self._call("cuEventSynchronize", event.synchronize)

    def hold(self, stream: int, event: Any) -> None:
        self._call("cuStreamWaitEvent", self._streams[stream].wait_for_event, event)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(self._call("cuEventElapsedTime", start.time_till, end))

    def begin_capture(self, _stream: int) -> None:
        raise CapabilityError("pycuda records no CUDA graphs, cuda-python does", next_step=_INSTALL)

    def end_capture(self, _stream: int) -> Any:
        raise AssertionError("nothing is recorded")

    def launch(self, _graph: Any, _stream: int) -> None:
        raise AssertionError("nothing is recorded")

    def free_graph(self, _graph: Any) -> None:
        raise AssertionError("nothing is recorded")

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._leave()

    def _leave(self) -> None:
        # Popped, the context is given back with the last object that was made in it, which may be an event that a
        # traceback still holds.
        self._streams.clear()
        self._context.pop()
        del self._context


_LIBRARIES: Final[Mapping[str, Callable[[int], Cuda]]] = {"cuda-python": _CudaPython, "pycuda": _PyCuda}
