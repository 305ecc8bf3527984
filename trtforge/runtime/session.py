"""An engine of a bundle, loaded on the GPU and ready to run."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from typing_extensions import Self

from trtforge.cuda import Cuda, open_cuda
from trtforge.digests import file_digest
from trtforge.errors import (
    CapabilityError,
    GraphError,
    IntegrityError,
    Problem,
    TrtForgeError,
    Where,
    closest,
    raise_any,
    shown_path,
)
from trtforge.gpu_models import compute_capability_number
from trtforge.machine import GpuFacts, machine_facts
from trtforge.profile_choice import is_inside, profile_for
from trtforge.release.later_versions import last_major, reaches, version_parts
from trtforge.release.manifest import Artifact, Manifest, ProfileRecord, RangeRecord, read_manifest
from trtforge.runtime.lane import Array, Lane, is_out_of_memory
from trtforge.types import Graph, Profile, ShapeRange

_AMPERE: Final = 80
_MOST_LINES: Final = 100
"""Of TensorRT's log, the latest."""


class EngineSession:
    """Loads one engine of a bundle and runs it, each request in the profile that `profile_for` names.

    Guarantees: the engine's bytes are those of the manifest before TensorRT sees them; it is for this GPU's compute
    capability, and for this TensorRT version or an earlier one that it is compatible with. Not for several threads at
    once; `lane` gives independent ones.

    Attributes:
        artifact: the engine's entry in the manifest.
        gpu: what it runs on.
        tensorrt: what runs it, with its version: `tensorrt 8.6.1`, `tensorrt_dispatch 10.16.1.11`.
        warnings: what is allowed and worth knowing, such as another GPU model of the same compute capability.
        engine_bytes: GPU memory that loading took, as the driver counts it.

    Example:
        >>> with EngineSession.open(Path("dist/manifest.json")) as session:  # doctest: +SKIP
        ...     outputs = session.run({"image": image})
    """

    artifact: Artifact
    gpu: GpuFacts
    tensorrt: str
    warnings: tuple[str, ...]
    engine_bytes: int

    def __init__(
        self, trt: Any, name: str, cuda: Cuda, artifact: Artifact, gpu: GpuFacts, warnings: tuple[str, ...]
    ) -> None:
        """Use `open`."""
        self._trt, self.cuda, self.artifact, self.gpu, self.warnings = trt, cuda, artifact, gpu, warnings
        self.tensorrt = f"{name} {trt.__version__}"
        self.profiles = tuple(_profile(record) for record in artifact.profiles)
        self._lanes: dict[tuple[str, Hashable], Lane] = {}
        self._calls: set[int] = set()
        self._log: list[str] = []
        self.engine: Any = None
        self._runtime: Any = None
        self._closing = ExitStack()  # from the last one on; whatever one raises, the others follow
        self._closing.callback(cuda.close)
        self._closing.callback(self._unload)

    @classmethod
    def open(
        cls,
        manifest_path: Path,
        *,
        identifier: str | None = None,
        cuda_library: str | None = None,
        device: int = 0,
        runtime: str | None = None,
        plugins: Sequence[Path] = (),
        models: Sequence[Graph] = (),
        allow_host_code: bool = False,
    ) -> Self:
        """Loads the engine of a manifest that is for the GPU at hand.

        Args:
            manifest_path: the manifest; engines lie beside it.
            identifier: which engine, where several are for this GPU.
            cuda_library: "cuda-python" or "pycuda"; by default the first that is installed.
            device: CUDA's index of the GPU.
            runtime: "tensorrt", or "tensorrt_lean" or "tensorrt_dispatch" for a version-compatible engine; by default
                the first of them that is installed.
            plugins: libraries that the engine needs, whose digests stand in the manifest.
            models: where an engine that was built with `strip_weights` gets its weights: the one of them that it was
                built from, by the manifest's digest.
            allow_host_code: whether a version-compatible engine may bring its own runtime library, which is native
                code that runs in this process.

        Raises:
            CapabilityError: no GPU, no TensorRT, no engine for them, or too little memory.
            IntegrityError: the engine's bytes are not those of the manifest, or TensorRT does not take them.
        """
        manifest = read_manifest(manifest_path)
        gpu = _gpu(device)
        artifact = _artifact(manifest, gpu, identifier, manifest_path)
        if artifact.settings.get("version_compatible") and not allow_host_code:
            raise CapabilityError(
                f"{artifact.identifier} is version-compatible: it brings native code that would run in this process",
                next_step="add --allow-host-code, if you trust where it was built",
            )
        name, trt = _tensorrt(artifact, runtime)
        warnings = _refuse_other_machine(artifact, gpu, name, trt.__version__, manifest_path)
        session = cls(trt, name, open_cuda(cuda_library, device), artifact, gpu, warnings)
        try:
            session._load(manifest_path.parent / artifact.file, plugins, models, allow_host_code=allow_host_code)
        except BaseException:
            session.close()
            raise
        return session

    def _load(self, path: Path, plugins: Sequence[Path], models: Sequence[Graph], *, allow_host_code: bool) -> None:
        model = _source_of_weights(self.artifact, models)
        data = _checked_bytes(path, self.artifact)
        log = _log(self._trt, self._log)
        _load_plugins(self._trt, log, plugins, self.artifact)
        try:
            self._runtime = self._trt.Runtime(log)
        except TypeError as error:  # how the bindings say that TensorRT gave none
            raise CapabilityError(
                f"TensorRT {self._trt.__version__} does not start here",
                detail=self._log[-5:],
                next_step="trtforge doctor",
            ) from error
        if allow_host_code:
            self._runtime.engine_host_code_allowed = True
        before, total = self.cuda.memory()
        self.engine = self._runtime.deserialize_cuda_engine(data)
        if self.engine is not None and model is not None:
            self._refit(model, log)
        self._free_bytes = self.cuda.memory()[0]
        if self.engine is None:
            raise _not_loaded(self.artifact, f"TensorRT {self._trt.__version__}", self._log, (before, total))
        self.engine_bytes = max(before - self._free_bytes, 0)

    def _refit(self, model: Graph, log: Any) -> None:
        """Puts the weights of the model into the engine."""
        refitter = self._trt.Refitter(self.engine, log)
        parser = self._trt.OnnxParserRefitter(refitter, log)
        named_as = str((model.weights_dir / model.path.name).absolute())  # external weights are looked for beside it
        if not parser.refit_from_bytes(model.path.read_bytes(), named_as) or not refitter.refit_cuda_engine():
            raise IntegrityError(
                f"TensorRT {self._trt.__version__} does not take the weights of {shown_path(model.path)}",
                detail=self._log[-5:],
                next_step="trtforge build SPEC  # with builder: {strip_weights: false}",
            )

    @property
    def run_bytes(self) -> int:
        """GPU memory that contexts and tensors take besides the engine, as the driver counts it."""
        return max(self._free_bytes - self.cuda.memory()[0], 0)

    def layers_json(self) -> str:
        """The engine's layers as TensorRT's inspector tells them, in JSON; none of them where the runtime has no inspector.

        Types of tensors of open sizes are told only after a run.
        """
        if not hasattr(self._trt, "EngineInspector"):
            return '{"Layers": []}'
        inspector = self.engine.create_engine_inspector()
        for lane in self._lanes.values():
            lane.show(inspector)
        text: str = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        return text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(CapabilityError):  # the first error is the one to tell
            self.close()

    def close(self) -> None:
        """Gives everything on the GPU back; a second time does nothing."""
        self._closing.close()

    def _refuse_closed(self) -> None:
        if self.engine is None:
            text = f"the session of {self.artifact.identifier} is closed"
            raise CapabilityError(text, next_step="open it again, and run what is left before it is closed")

    def _unload(self) -> None:
        self._lanes.clear()
        self.engine = None  # before its runtime
        self._runtime = None

    def lane(self, profile: Profile, which: Hashable = 0, *, beside: Lane | None = None) -> Lane:
        """The context of a profile; every other `which` is another one, independent, or computing by turns with `beside`.

        Raises:
            CapabilityError: the GPU has no memory for it.
        """
        self._refuse_closed()
        key = (profile.name, which)
        if key not in self._lanes:
            index, version = self.profiles.index(profile), self.artifact.backend_version
            self._lanes[key] = Lane(
                self._trt,
                self.engine,
                self.cuda,
                index,
                self._log,
                remembers_sizes=version.startswith("8."),  # whose code runs it, in a later runtime too
                beside=beside,
            )
            self._closing.callback(self._lanes[key].close)
        return self._lanes[key]

    def profile(self, feeds: Mapping[str, Array]) -> Profile:
        """The profile that these inputs run in.

        Raises:
            GraphError: an input is missing or none of the engine's, or no profile allows the shapes.
        """
        shapes = {name: np.shape(array) for name, array in feeds.items()}
        raise_any(self._name_problems(feeds))
        found = profile_for(shapes, self.profiles)
        if found is None:
            raise GraphError(
                f"no profile of {self.artifact.identifier} allows "
                + ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()),
                detail=[line for profile in self.profiles for line in _outside(profile, shapes)],
                next_step="pad or split the request, or add a profile to the spec and build again",
            )
        return found

    def run(self, feeds: Mapping[str, Array], *, with_graph: bool = False) -> dict[str, Array]:
        """Runs the engine once.

        Args:
            feeds: input name -> array; values are converted to the engine's types.
            with_graph: whether to replay a CUDA graph, recorded at the first request of a shape. Each shape then has a
                context of its own, with its memory, until the session is closed.

        Returns:
            Output name -> array, in the engine's order.

        Raises:
            GraphError: an input is missing, no profile allows the shapes, or the engine's integers do not hold
                a value.
            CapabilityError: the GPU has no memory for it, or stopped.
        """
        which = tuple(np.shape(feeds[name]) for name in sorted(feeds)) if with_graph else 0
        lane = self.lane(self.profile(feeds), which)
        lane.prepare(feeds)
        lane.run(with_graph=with_graph)
        return lane.outputs()

    def run_each(self, requests: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, Array]]:
        """Runs many requests, and yields the outputs of each in their order, as `run` gives them.

        Copies of a request overlap the compute of the one before, in a second context of each profile. A request is
        read while the one before it runs. Calls that are under way at the same time have contexts of their own.

        Raises:
            As `run`. Outputs of the requests before one that does not fit are yielded first.
        """
        call = next(number for number in itertools.count() if number not in self._calls)
        self._calls.add(call)
        started: deque[Lane] = deque()
        try:
            for number, feeds in enumerate(requests):
                profile = self.profile(feeds)
                lane = self.lane(profile, ("each", call, 0))
                if number % 2:
                    lane = self.lane(profile, ("each", call, 1), beside=lane)
                if len(started) > 1:
                    yield started.popleft().finish()
                    self._refuse_closed()
                lane.prepare(feeds)
                lane.start()
                started.append(lane)
            while started:
                self._refuse_closed()
                yield started.popleft().finish()
        except GraphError:
            while started:
                yield started.popleft().finish()
            raise
        finally:
            with suppress(CapabilityError):  # what stopped the GPU was told to whoever waited for it
                for lane in started if self.engine is not None else ():  # the next call may take their contexts
                    lane.finish()
            self._calls.remove(call)

    def _name_problems(self, feeds: Mapping[str, Array]) -> list[Problem]:
        names = [tensor.name for tensor in self.artifact.inputs]
        missing = [f"input '{name}' is missing" for name in names if name not in feeds]
        extra = [name for name in feeds if name not in names]
        return [
            Problem(text, f"give all of: {', '.join(names)}", exit_code=GraphError.exit_code) for text in missing
        ] + [
            Problem(
                f"'{name}' is no input of {self.artifact.identifier}",
                f"rename it to '{meant}'" if (meant := closest(name, names)) else "leave it out",
                exit_code=GraphError.exit_code,
            )
            for name in extra
        ]


def _gpu(device: int) -> GpuFacts:
    facts = machine_facts()
    if device >= len(facts.gpus):
        reason = facts.cuda_error or f"{len(facts.gpus)} are visible"
        raise CapabilityError(f"there is no GPU {device} here: {reason}", next_step="trtforge doctor")
    return facts.gpus[device]


def _full() -> Any:
    import tensorrt  # noqa: PLC0415 - where an engine needs it

    return tensorrt


def _lean() -> Any:
    try:
        import tensorrt_lean  # noqa: PLC0415 - where an engine needs it
    except ModuleNotFoundError:
        import tensorrt_lean_bindings as tensorrt_lean  # noqa: PLC0415 - all that the wheel of the bindings alone brings
    return tensorrt_lean


def _dispatch() -> Any:
    try:
        import tensorrt_dispatch  # noqa: PLC0415 - where an engine needs it
    except ModuleNotFoundError:
        import tensorrt_dispatch_bindings as tensorrt_dispatch  # noqa: PLC0415 - as for the lean runtime
    return tensorrt_dispatch


def _rtx() -> Any:
    import tensorrt_rtx  # noqa: PLC0415 - where an engine needs it

    return tensorrt_rtx


_RUNTIMES: Final[Mapping[str, Callable[[], Any]]] = {
    "tensorrt": _full,
    "tensorrt_lean": _lean,
    "tensorrt_dispatch": _dispatch,
    "tensorrt_rtx": _rtx,
}
_COMPATIBLE: Final = ("tensorrt", "tensorrt_lean", "tensorrt_dispatch")
"""Runtimes of version-compatible engines. Source: TensorRT documentation, "Runtimes": lean and dispatch run no others."""


def _tensorrt(artifact: Artifact, runtime: str | None) -> tuple[str, Any]:
    """Name and module of the runtime asked for, or of the first that is installed.

    Raises:
        CapabilityError: the engine does not run in it, or it is not installed.
    """
    names = _COMPATIBLE if artifact.settings.get("version_compatible") else (artifact.backend,)
    if runtime not in (None, *names):
        raise CapabilityError(
            f"{artifact.identifier} runs in {' or '.join(names)}, found runtime '{runtime}'",
            next_step="trtforge build SPEC  # with builder: {version_compatible: true}"
            if runtime in _COMPATIBLE
            else f"name one of: {', '.join(names)}",
        )
    missing = []
    for name in names if runtime is None else (runtime,):
        try:
            return name, _RUNTIMES[name]()
        except ImportError as error:
            missing.append(f"{name}: {error}")
    wanted = f"{runtime or artifact.backend} {artifact.backend_version}"
    raise CapabilityError(
        f"{artifact.identifier} needs {wanted}, which is not installed",
        detail=missing,
        next_step=f"pip install {wanted.replace(' ', '==')}",
    )


def _source_of_weights(artifact: Artifact, models: Sequence[Graph]) -> Graph | None:
    """The model that a stripped engine was built from; None for an engine that has its weights."""
    if not artifact.settings.get("strip_weights"):
        return None
    for model in models:
        if model.digest == artifact.graph_digest:
            return model
    raise CapabilityError(
        f"{artifact.identifier} was built without its weights, which are in the model {artifact.graph_digest[:12]}",
        detail=[f"given: {shown_path(model.path)} {model.digest[:12]}" for model in models],
        next_step=(
            f"add --model FILE.onnx, that model; trtforge store get {artifact.graph_digest[:12]} FILE.onnx gets one that"
            " trtforge lowered"
        ),
    )


def _load_plugins(trt: Any, log: Any, plugins: Sequence[Path], artifact: Artifact) -> None:
    """Loads the libraries that an engine was built with, after their digests; others never run."""
    found = {file_digest(path): path for path in plugins}
    missing = [digest[:12] for digest in artifact.plugins if digest not in found]
    if missing:
        raise CapabilityError(
            f"{artifact.identifier} needs {len(missing)} plugin libraries that were not given: {', '.join(missing)}",
            detail=[f"given: {path} {digest[:12]}" for digest, path in found.items()],
            next_step="add --plugin LIBRARY.so, the one that it was built with",
        )
    # TensorRT's own too, of which a parser makes some operators. The small runtimes have none.
    if hasattr(trt, "init_libnvinfer_plugins"):
        trt.init_libnvinfer_plugins(log, "")
    for digest in artifact.plugins:
        try:
            ctypes.CDLL(str(found[digest].resolve()), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise CapabilityError(
                f"plugin library {shown_path(found[digest])} cannot be loaded: {error}",
                next_step=f"ldd {shown_path(found[digest])}",
            ) from error


def _not_loaded(artifact: Artifact, who: str, log: list[str], memory: tuple[int, int]) -> TrtForgeError:
    free, total = memory
    if is_out_of_memory(log):
        return CapabilityError(
            f"{artifact.file} needs at least {artifact.size_bytes / 2**20:.1f} MiB of GPU memory, and {free / 2**20:.1f} "
            f"MiB of {total / 2**20:.1f} MiB are free",
            detail=log[-5:],
            next_step="nvidia-smi  # shows what else uses the GPU",
        )
    return IntegrityError(
        f"{who} does not load {artifact.file}", detail=log[-5:], next_step="trtforge build SPEC  # on this machine"
    )


def _artifact(manifest: Manifest, gpu: GpuFacts, identifier: str | None, manifest_path: Path) -> Artifact:
    """The engine asked for, or the only one for this GPU."""
    names = [artifact.identifier for artifact in manifest.artifacts]
    if identifier is not None:
        for artifact in manifest.artifacts:
            if artifact.identifier == identifier:
                return artifact
        meant = closest(identifier, names)
        raise CapabilityError(
            f"the manifest has no engine '{identifier}'",
            where=Where(manifest_path),
            next_step=f"name '{meant}'" if meant else f"name one of: {', '.join(names)}",
        )
    fitting = [entry for entry in manifest.artifacts if _is_for_gpu(entry, gpu)]
    exact = [entry for entry in fitting if gpu.model and entry.target_gpu.upper() == gpu.model.upper()]
    same = [entry for entry in fitting if entry.compute_capability == gpu.compute_capability]
    found = exact or same or fitting
    if len(found) == 1:
        return found[0]
    text = f"{len(found)} engines for {gpu.device_name} ({gpu.compute_capability})"
    raise CapabilityError(
        f"the manifest has {text}" + (f": {', '.join(entry.identifier for entry in found)}" if found else ""),
        where=Where(manifest_path),
        next_step="name one with --engine" if found else "trtforge build SPEC  # with this GPU in its targets",
    )


def _refuse_other_machine(
    artifact: Artifact, gpu: GpuFacts, runtime: str, version: str, manifest_path: Path
) -> tuple[str, ...]:
    """What must agree before TensorRT sees an engine; what may differ is returned as warnings."""
    problems = []
    code = CapabilityError.exit_code
    if not _is_for_gpu(artifact, gpu):
        text = f"{artifact.identifier} is for {artifact.compute_capability}, and {gpu.device_name} is "
        problems.append(
            Problem(
                f"{text}{gpu.compute_capability}",
                "trtforge build SPEC  # with this GPU in its targets",
                Where(manifest_path),
                (),
                code,
            )
        )
    if not _is_for_version(artifact, version):
        built = version_parts(artifact.backend_version)
        later = f" to {last_major(built)}.x" if artifact.settings.get("version_compatible") else ""
        problems.append(
            Problem(
                f"{artifact.identifier} is for {artifact.backend} {artifact.backend_version}{later}, and {version} "
                "is installed",
                f"pip install {runtime}=={artifact.backend_version}",
                Where(manifest_path),
                (),
                code,
            )
        )
    raise_any(problems)
    on = artifact.built_on
    if on is not None and on.device_name != gpu.device_name:
        return (f"{artifact.identifier} was built and timed on {on.device_name}, and this is {gpu.device_name}",)
    return ()


def _is_for_gpu(artifact: Artifact, gpu: GpuFacts) -> bool:
    """By compute capability.

    Source: TensorRT documentation, "Hardware Compatibility": ampere_plus runs on all from compute capability 8.0 on.
    """
    is_ampere_plus = artifact.settings.get("hardware_compatibility") == "ampere_plus"
    if is_ampere_plus and compute_capability_number(gpu.compute_capability) >= _AMPERE:
        return True
    return artifact.compute_capability == gpu.compute_capability


def _is_for_version(artifact: Artifact, version: str) -> bool:
    built, found = version_parts(artifact.backend_version), version_parts(version)
    is_same = built[: len(found)][:3] == found[:3]
    return is_same or (bool(artifact.settings.get("version_compatible")) and reaches(built, found))


def _checked_bytes(path: Path, artifact: Artifact) -> bytes:
    """The engine, after its digest: a damaged or exchanged one never reaches TensorRT."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IntegrityError(
            f"{artifact.file}: {error.strerror}", next_step="copy the whole folder again from where it was built"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != artifact.digest or len(data) != artifact.size_bytes:
        raise IntegrityError(
            f"{artifact.file} is not the engine of the manifest: found sha256 {found[:12]}, {len(data)} bytes, "
            f"expected {artifact.digest[:12]}, {artifact.size_bytes}",
            next_step="copy the whole folder again from where it was built",
        )
    return data


def _log(trt: Any, lines: list[str]) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity.name in ("INTERNAL_ERROR", "ERROR", "WARNING"):
                lines.append(f"{severity.name}: {text}")
                del lines[:-_MOST_LINES]

    return Log()


def _profile(record: ProfileRecord) -> Profile:
    return Profile(record.name, _ranges(record.shapes), _ranges(record.values))


def _ranges(records: Mapping[str, RangeRecord]) -> dict[str, ShapeRange]:
    return {name: ShapeRange(entry.min, entry.opt, entry.max) for name, entry in records.items()}


def _outside(profile: Profile, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"profile '{profile.name}' allows '{name}' from {list(allowed.min)} to {list(allowed.max)}"
        for name, allowed in profile.shapes.items()
        if name in shapes and not is_inside(shapes[name], allowed)
    ]
