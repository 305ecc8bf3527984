"""A GPU that is none: memory is the host's, what is put into a stream happens at once or late, what is not given back shows.

Together with the stand-in for TensorRT it runs an engine that doubles its rows, or keeps those that are above 0.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import weakref
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
from stand_in import StandIn

from trtforge.errors import CapabilityError

TOTAL = 1 << 30
COPY_MS = 1.0


class FakeCuda:
    """Implements `trtforge.cuda.Cuda`. The clock counts a millisecond a copy, and one for each row that is computed.

    Attributes:
        live: what was made and not given back, by name.
        allocations_left: how many more allocations succeed.
        chance: by which streams go on at their own pace, as far as events allow; without one, all happens at once.
    """

    name = "fake"

    def __init__(self, note):
        self.note = note
        self.live = {}
        self.names = {}
        self.allocations_left = 1_000_000
        self.clock_ms = 0.0
        self.recording = None
        self.chance = None
        self._queues = defaultdict(deque)
        self._count = itertools.count(1)

    def _make(self, kind, handle, thing):
        name = f"{kind}{next(self._count)}"
        self.live[handle] = name, thing
        self.names[handle] = name
        return handle

    def _end(self, handle):
        name, _ = self.live.pop(handle)  # KeyError: given back twice
        self.note(f"cuda.free({name})")

    def do(self, action, stream=0):
        """In order of the stream, or each time that the graph under recording is launched."""
        if self.recording is not None:
            self.recording.append(action)
            return
        self._queues[stream].append(action)
        if self.chance is None:
            self.drain(stream)
            return
        for _ in range(self.chance.randrange(4)):
            waiting = [queue for queue in self._queues.values() if queue]
            if waiting:
                self.chance.choice(waiting).popleft()()

    def drain(self, stream):
        """Lets everything in a stream happen."""
        while self._queues[stream]:
            self._queues[stream].popleft()()

    def _reach(self, mark, stream):
        while "at" not in mark:
            self._queues[stream].popleft()()

    def memory(self):
        return TOTAL - sum(thing.nbytes for _, thing in self.live.values() if isinstance(thing, np.ndarray)), TOTAL

    def _array(self, kind, num_bytes):
        assert self.recording is None, "memory is allocated while a graph is recorded"
        if not self.allocations_left:
            raise CapabilityError(f"{num_bytes} bytes are needed", next_step="nvidia-smi")
        self.allocations_left -= 1
        assert num_bytes > 0
        array = np.full(num_bytes, 0xCD, np.uint8)
        self._make(kind, array.ctypes.data, array)
        self.note(f"cuda.{kind}({num_bytes})")
        return array

    def allocate(self, num_bytes):
        return self._array("device", num_bytes).ctypes.data

    def free(self, pointer):
        for stream in list(self._queues):  # as cudaFree does
            self.drain(stream)
        self._end(pointer)

    def allocate_host(self, num_bytes):
        return self._array("host", num_bytes)

    def free_host(self, memory):
        self._end(memory.ctypes.data)

    def stream(self):
        return self._make("stream", 7000 + next(self._count), None)

    def free_stream(self, stream):
        self._end(stream)

    def _copy(self, target, source, num_bytes, stream):
        def copy():
            assert {target, source} <= self.live.keys(), "memory was given back before it was copied"
            self.clock_ms += COPY_MS
            ctypes.memmove(target, source, num_bytes)

        assert num_bytes > 0
        self.do(copy, stream)

    def to_device(self, pointer, memory, stream):
        self.note(f"cuda.to_device({memory.nbytes})")
        self._copy(pointer, memory.ctypes.data, memory.nbytes, stream)

    def to_host(self, memory, pointer, stream):
        self.note(f"cuda.to_host({memory.nbytes})")
        self._copy(memory.ctypes.data, pointer, memory.nbytes, stream)

    def synchronize(self, stream):
        assert stream in self.live
        assert self.recording is None
        self.note("cuda.synchronize")
        self.drain(stream)

    def event(self, *, spin):
        del spin
        return self._make("event", next(self._count), {})

    def free_event(self, event):
        self._end(event)

    def record(self, event, stream):
        mark = {}
        self.live[event][1]["last"] = mark, stream
        self.do(lambda: mark.update(at=self.clock_ms), stream)

    def wait_for(self, event):
        self._reach(*self.live[event][1]["last"])

    def hold(self, stream, event):
        assert stream in self.live
        last = self.live[event][1]["last"]  # KeyError: it was never recorded
        self.do(lambda: self._reach(*last), stream)

    def elapsed_ms(self, start, end):
        return self.live[end][1]["last"][0]["at"] - self.live[start][1]["last"][0]["at"]

    def begin_capture(self, _stream):
        self.note("cuda.begin_capture")
        self.recording = []

    def end_capture(self, _stream):
        self.note("cuda.end_capture")
        actions, self.recording = self.recording, None
        return self._make("graph", 9000 + next(self._count), actions)

    def launch(self, graph, stream):
        self.note("cuda.launch")
        for action in self.live[graph][1]:
            self.do(action, stream)

    def free_graph(self, graph):
        self._end(graph)

    def close(self):
        self.note("cuda.close")


class Rig:
    """A module `tensorrt` of a version, with a FakeCuda.

    Attributes:
        trace: calls, in order.
        sizes_by_data: whether the engine keeps rows above 0, so that its output's size depends on the data.
        takes_weights: whether an engine can be refitted from a model.
        shares_profiles: whether a profile may have several contexts.
        log: what TensorRT logs while it loads; then it loads nothing.
        refuses: what it logs in place of running.
        takes_shapes: whether it takes what inputs' shapes are set to.
        takes_profiles: whether a context takes the profile that is chosen.
    """

    def __init__(self, version, *, sized_by_data=False):
        self.trace = []
        self.cuda = FakeCuda(self.trace.append)
        self.sized_by_data = sized_by_data
        self.shares_profiles = True
        self.takes_weights = True
        self.refuses = ""
        self.takes_shapes = True
        self.takes_profiles = True
        self.log = ()
        self.version = version
        methods = {
            name.replace("__", "."): method
            for name, method in {
                "Runtime__deserialize_cuda_engine": self._engine,
                "ICudaEngine__get_tensor_name": lambda _engine, index: "xy"[index],
                "ICudaEngine__get_tensor_mode": lambda _engine, name: self._mode("INPUT" if name == "x" else "OUTPUT"),
                "ICudaEngine__get_tensor_dtype": lambda *_: self.stand_in.names["DataType"].FLOAT,
                "ICudaEngine__get_tensor_location": lambda *_: self.stand_in.names["TensorLocation"].DEVICE,
                "ICudaEngine__create_execution_context": self._context,
                "ICudaEngine__create_engine_inspector": lambda _engine: self.stand_in.make("EngineInspector"),
                "EngineInspector__get_engine_information": self._layers,
                "OnnxParserRefitter__refit_from_bytes": lambda *_: self.takes_weights,
                "Refitter__refit_cuda_engine": lambda _refitter: True,
                "IExecutionContext__set_optimization_profile_async": self._set_profile,
                "IExecutionContext__set_input_shape": self._set_shape,
                "IExecutionContext__set_tensor_address": self._set_address,
                "IExecutionContext__set_output_allocator": self._set_allocator,
                "IExecutionContext__infer_shapes": lambda _context: [],
                "IExecutionContext__get_tensor_shape": self._shape,
                "IExecutionContext__get_max_output_size": lambda context, _name: self._most_bytes(context),
                "IExecutionContext__execute_async_v3": self._execute,
            }.items()
        } | {"Runtime.__init__": self._start}
        self.stand_in = StandIn(version, self.trace.append, methods)
        self.module = SimpleNamespace(**self.stand_in.names)

    def text(self):
        """The trace, with names in place of addresses and without questions."""
        lines = [line for line in self.trace if not line.startswith(("ICudaEngine.get_", "IExecutionContext.get_"))]
        text = "\n".join(lines) + "\n"
        for handle in sorted(self.cuda.names, reverse=True):
            text = text.replace(str(handle), self.cuda.names[handle])
        return text

    def _mode(self, name):
        return self.stand_in.names["TensorIOMode"][name]

    def _make(self, kind, **values):
        made = self.stand_in.make(kind, **values)
        weakref.finalize(made, self.trace.append, f"~{kind}")
        return made

    def _start(self, runtime, logger):
        runtime.__dict__["log"] = self.runtime_log = logger
        weakref.finalize(runtime, self.trace.append, "~Runtime")

    def _engine(self, runtime, _data):
        if self.log:
            for line in self.log:
                runtime.log.log(self.stand_in.names["ILogger"].Severity.ERROR, line)
            return None
        names = self.stand_in.data["classes"]["ICudaEngine"]
        size = "device_memory_size_v2" if "device_memory_size_v2" in names else "device_memory_size"
        return self._make("ICudaEngine", num_io_tensors=2, contexts=[], **{size: 5 << 20})

    def _layers(self, _inspector, _format):
        return '{"Layers": []}'

    def _context(self, engine):
        if self.cuda.allocations_left == 0:
            return None
        context = self._make("IExecutionContext", addresses={}, shape=None, allocator=None, changes=0, profile=None)
        engine.contexts.append(weakref.ref(context))
        context.__dict__["siblings"] = engine.contexts
        return context

    def _set_profile(self, context, index, _stream):
        taken = [one().profile for one in context.siblings if one() is not None and one() is not context]
        if not self.takes_profiles or (index in taken and not self.shares_profiles):
            return False
        context.__dict__["profile"] = index
        return True

    def _changed(self, context, **values):
        context.__dict__.update(values, changes=context.changes + 1)
        return True

    def _set_shape(self, context, _name, shape):
        if not self.takes_shapes:
            self.runtime_log.log(self.stand_in.names["ILogger"].Severity.ERROR, "the shape is unwell")
            return False
        return self._changed(context, shape=tuple(shape))

    def _set_address(self, context, name, address):
        assert address in self.cuda.live
        assert name == "x" or not self.sized_by_data, "whose size nobody knows"
        return self._changed(context, addresses={**context.addresses, name: address})

    def _set_allocator(self, context, _name, allocator):
        return self._changed(context, allocator=allocator)

    def _shape(self, context, name):
        """Seen with 8.6: after a run, an output that is sized by the data has the sizes of that run."""
        if name == "y" and self.sized_by_data:
            return context.__dict__.get("found", (-1, 8))
        return context.shape

    def _execute(self, context, stream):
        if self.refuses:
            self.runtime_log.log(self.stand_in.names["ILogger"].Severity.ERROR, self.refuses)
            return False
        changes = context.changes

        def compute():
            assert context.changes == changes, "a graph runs after its context changed"
            self.cuda.clock_ms += context.shape[0]
            num_bytes = math.prod(context.shape) * 4
            x = np.frombuffer(ctypes.string_at(context.addresses["x"], num_bytes), np.float32).reshape(context.shape)
            y = x[x[:, 0] > 0] if self.sized_by_data else 2 * x
            target = self._target(context, y) if self.sized_by_data else context.addresses["y"]
            assert y.nbytes <= self.cuda.live[target][1].nbytes, "it writes beyond its memory"
            ctypes.memmove(target, np.ascontiguousarray(y).ctypes.data, y.nbytes)

        try:
            self.cuda.do(compute, stream)
            if self.sized_by_data and self.cuda.recording is None:  # TensorRT waits until it knows the size
                self.cuda.drain(stream)
        except MemoryError:
            return False
        return True

    def _most_bytes(self, context):
        return math.prod(self._shape(context, "y")) * 4 if "found" in context.__dict__ else math.prod(context.shape) * 4

    def _target(self, context, y):
        """Seen with 8.6: a context that has run asks for less than its next run writes."""
        allocator = context.allocator
        if self.version.startswith("8"):
            pointer = allocator.reallocate_output("y", 0, self._most_bytes(context), 256)
        else:
            pointer = allocator.reallocate_output_async("y", 0, y.nbytes, 256, 0)
        if not pointer:
            raise MemoryError
        allocator.notify_shape("y", y.shape)
        if self.version.startswith("8"):
            context.__dict__["found"] = y.shape
        return pointer
