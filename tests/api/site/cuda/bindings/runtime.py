"""The calls of cuda-python's runtime API that a calibration makes; device memory is the host's.

STAND_IN_CUDA_FREE: bytes that there are.
"""

import ctypes
import enum
import os

cudaMemcpyKind = enum.IntEnum("cudaMemcpyKind", {"cudaMemcpyHostToDevice": 1, "cudaMemcpyDeviceToHost": 2})  # noqa: N816


_Status = enum.IntEnum("_Status", {"cudaSuccess": 0, "cudaErrorMemoryAllocation": 2})


_OK = _Status.cudaSuccess
_FREE = int(os.environ.get("STAND_IN_CUDA_FREE", "1000000000"))
_memory = {}


def cudaSetDevice(_device):  # noqa: N802
    return (_OK,)


def cudaRuntimeGetVersion():  # noqa: N802
    return _OK, 12090


def cudaMemGetInfo():  # noqa: N802
    return _OK, _FREE, 1 << 30


def cudaGetLastError():  # noqa: N802
    return (_OK,)


def cudaMalloc(num_bytes):  # noqa: N802
    if num_bytes > _FREE:
        return _Status.cudaErrorMemoryAllocation, None
    memory = ctypes.create_string_buffer(b"\xcd" * num_bytes, num_bytes)
    _memory[ctypes.addressof(memory)] = memory
    return _OK, ctypes.addressof(memory)


def cudaHostAlloc(num_bytes, _flags):  # noqa: N802
    memory = ctypes.create_string_buffer(num_bytes)
    _memory[ctypes.addressof(memory)] = memory
    return _OK, ctypes.addressof(memory)


def cudaFree(pointer):  # noqa: N802
    if pointer:
        del _memory[pointer]
    return (_OK,)


def cudaFreeHost(pointer):  # noqa: N802
    del _memory[pointer]
    return (_OK,)


def cudaStreamCreateWithFlags(_flags):  # noqa: N802
    return _OK, 7


def cudaStreamSynchronize(_stream):  # noqa: N802
    return (_OK,)


def cudaStreamDestroy(_stream):  # noqa: N802
    assert not _memory, "memory is not given back"
    return (_OK,)


def cudaMemcpyAsync(target, source, num_bytes, _kind, _stream):  # noqa: N802
    ctypes.memmove(target, source, num_bytes)
    return (_OK,)
