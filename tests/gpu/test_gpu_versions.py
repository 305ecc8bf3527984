"""A version-compatible engine in TensorRT itself and in the dispatch runtime of a later version.

Needs libnvinfer_lean of the building version on LD_LIBRARY_PATH (the package tensorrt-lean), and the dispatch runtime
as a module `tensorrt_dispatch`. Without pytest: python tests/gpu/test_gpu_versions.py
"""

# ruff: noqa: T201 - versions and times are for reading: pytest -s
from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from unittest import SkipTest

import numpy as np
from place import DIGITS, Place, cosine, images, raises, run_all

from trtforge.errors import CapabilityError
from trtforge.runtime.session import EngineSession

try:
    import pytest
except ModuleNotFoundError:
    pytest = None
else:
    pytestmark = pytest.mark.gpu

COUNTS = (1, 16, 64, 65, 256)
LEAST = {"fp32": 0.99999, "fp16": 0.9999}
DISPATCH = [name for name in ("tensorrt_dispatch", "tensorrt_dispatch_bindings") if importlib.util.find_spec(name)]
# A process has one TensorRT.
RUN = """
import sys
from pathlib import Path
import numpy as np
from place import images
from trtforge.runtime.session import EngineSession

runtime, library, result, *manifests = sys.argv[1:]
for number, manifest in enumerate(manifests):
    with EngineSession.open(Path(manifest), runtime=runtime, cuda_library=library, allow_host_code=True) as session:
        print(session.tensorrt, "runs", session.artifact.identifier, "of TensorRT", session.artifact.backend_version)
        print("warnings", session.warnings, "layers", session.layers_json()[:100])
        found = {}
        for count in (1, 16, 64, 65, 256):
            found[str(count)] = session.run({"image": images(count)})["logits"]
            if library == "cuda-python":
                again = session.run({"image": images(count)}, with_graph=True)["logits"]
                assert np.array_equal(found[str(count)], again), count
        print("bytes of GPU memory", session.engine_bytes, "loaded,", session.run_bytes, "to run")
    np.savez(f"{result}/{number}.npz", **found)
"""


def make(folder):
    place = Place(folder)
    for precision in LEAST:
        place.build(f"any-{precision}", DIGITS, precision=precision, settings=", version_compatible: true")
    return place


if pytest:

    @pytest.fixture(scope="module")
    def built(tmp_path_factory):
        return make(tmp_path_factory.mktemp("gpu"))


def runs_as_onnxruntime(built, runtime, library):
    manifests = [str(built.manifest(f"any-{precision}")) for precision in LEAST]
    path = f"{Path(__file__).parent}{os.pathsep}{built.surroundings()['PYTHONPATH']}"
    done = built.python("-c", RUN, runtime, library, str(built.folder), *manifests, PYTHONPATH=path)
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0, done.stderr
    reference = built.digits()
    for number, (precision, least) in enumerate(LEAST.items()):
        with np.load(built.folder / f"{number}.npz") as found:
            for count in COUNTS:
                expected = reference.run({"image": images(count)})["logits"]
                agreement = cosine(found[str(count)], expected)
                assert agreement > least, (precision, library, count, agreement)


def test_it_runs_in_the_version_that_built_it(built):
    runs_as_onnxruntime(built, "tensorrt", "cuda-python")


def test_it_runs_in_a_later_dispatch_runtime(built):
    if not DISPATCH:
        raise SkipTest("no tensorrt_dispatch")
    for library in ("cuda-python", "pycuda"):
        runs_as_onnxruntime(built, "tensorrt_dispatch", library)


def test_its_native_code_runs_only_where_that_is_allowed(built):
    for runtime in (None, *(["tensorrt_dispatch"] if DISPATCH else [])):
        with raises(CapabilityError, "brings native code that would run in this process"):
            EngineSession.open(built.manifest("any-fp32"), runtime=runtime)
    done = built.trtforge("bench", built.manifest("any-fp32"))
    assert done.returncode == 6
    assert "--allow-host-code" in done.stderr


def test_an_engine_of_one_version_is_not_given_to_another_runtime(built):
    path, _ = built.copy("any-fp32", lambda artifact: artifact["settings"].update(version_compatible=False))

    with raises(CapabilityError, "runs in tensorrt, found runtime 'tensorrt_dispatch'"):
        EngineSession.open(path, runtime="tensorrt_dispatch", allow_host_code=True)


if __name__ == "__main__":
    sys.exit(run_all(sys.modules[__name__], make))
