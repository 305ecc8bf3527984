"""Makes a process that runs an engine believe in an H200, with the stand-ins for TensorRT and CUDA.

DIES: verb in which TensorRT crashes while it loads the engine. IS_OFF: what is added to each value. LAYERS: element types
that the inspector tells. A query takes 2 ms for copies, 1 ms a row, and 10 ms less the last byte of the engine.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
from dataclasses import replace

from fake_gpu import Rig

from trtforge import machine
from trtforge.machine import GpuFacts
from trtforge.runtime import session


class _Rig(Rig):
    def _engine(self, runtime, data):
        if os.environ.get("DIES") in sys.argv:
            sys.stderr.write("about to die\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGSEGV)
        engine = super()._engine(runtime, data)
        engine.__dict__["extra_ms"] = 10 - bytes(data)[-1]
        return engine

    def _context(self, engine):
        context = super()._context(engine)
        context.__dict__["extra_ms"] = engine.extra_ms
        return context

    def _execute(self, context, stream):
        def wait():
            self.cuda.clock_ms += context.extra_ms

        self.cuda.do(wait)
        done = super()._execute(context, stream)
        if off := float(os.environ.get("IS_OFF", "0")):
            values = (ctypes.c_float * math.prod(context.shape)).from_address(context.addresses["y"])
            values[:] = [value + off for value in values]
        return done

    def _layers(self, inspector, _format):
        context = inspector.__dict__.get("execution_context")
        is_told = context is not None and context.shape is not None
        types = os.environ.get("LAYERS", "FP32").split()
        texts = [f"Row major linear {name}" if is_told else "N/A due to dynamic shapes" for name in types]
        outputs = [[{"Name": "y", "Format/Datatype": text}] for text in texts]
        return json.dumps({"Layers": [{"Name": "add", "LayerType": "ElementWise", "Outputs": one} for one in outputs]})


_rig = _Rig(os.environ["STAND_IN_VERSION"])
sys.modules["tensorrt"] = _rig.module
session.open_cuda = lambda _library, _device: _rig.cuda
_h200 = GpuFacts(0, "NVIDIA H200", "H200", "sm90", 132, 150_000_000_000, "GPU-1")
_facts = replace(machine.machine_facts(), gpus=(_h200,), cuda_driver_version="580.1")
machine.machine_facts = session.machine_facts = lambda: _facts
if "bench" in sys.orig_argv:
    from trtforge import bench

    _measure = bench.measure
    bench.measure = lambda lanes, cuda, feeds, switches: _measure(
        lanes, cuda, feeds, replace(switches, duration_s=0.0, warm_up_ms=0.0)
    )
