"""Trains the quickstart's digit classifier, writes it as ONNX and its data as npz, and measures it with onnxruntime.

    pip install torch==2.13.0 onnx onnxruntime scikit-learn
    python scripts/train_digits.py

The data files come out byte for byte the same each time; the split has its own seed, so `--seed` changes the model only.
"""

# torch's classes are Any where it is not installed, and partly untyped where it is.
# mypy: disable-error-code="misc, no-untyped-call"
from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
DATA_FOLDER = ROOT / "calib_data" / "digits"
SPLIT_SEED = 0
NUM_EVAL = 500
NUM_EPOCHS = 40
BATCH = 32
PEAK_LEARNING_RATE = 5e-3
OPSET = 17


class DigitsNet(nn.Module):
    """Five 3x3 convolutions around one residual add: image (batch, 1, 8, 8) in 0..1 -> logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_conv(1, 16), nn.ReLU(), *_conv(16, 32), nn.ReLU())
        self.residual = nn.Sequential(*_conv(32, 32), nn.ReLU(), *_conv(32, 32))
        self.head = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), *_conv(32, 64), nn.ReLU())
        self.classifier = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Logits (batch, 10) of `image` (batch, 1, 8, 8)."""
        features = self.stem(image)
        features = self.head(features + self.residual(features))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


def _conv(channels_in: int, channels_out: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out)


def load_split() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Train (1,297) and eval (500) arrays: `image` (n, 1, 8, 8) float32 in 0..1, `label` (n,) int64 in 0..9.

    Source: scikit-learn's `load_digits`, pixels 0..16.
    """
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, np.newaxis]
    labels = digits.target.astype(np.int64)
    train, held_out = train_test_split(
        np.arange(len(labels)), test_size=NUM_EVAL, stratify=labels, random_state=SPLIT_SEED
    )
    return (
        {"image": images[train], "label": labels[train]},
        {"image": images[held_out], "label": labels[held_out]},
    )


def npz_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """A compressed npz whose bytes depend on the arrays alone: no time, no host system, no pickles."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3
            member.external_attr = 0o644 << 16
            npy = io.BytesIO()
            np.lib.format.write_array(npy, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
            archive.writestr(member, npy.getvalue(), compresslevel=9)
    return file.getvalue()


def write_atomically(path: Path, content: bytes) -> None:
    """`path` holds either what it held before or all of `content`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_bytes(content)
    os.replace(partial, path)  # noqa: PTH105 - replaces on every system, as Path.rename does not


def shifted(images: Tensor) -> Tensor:
    """Each image (batch, 1, 8, 8) moved by -1, 0 or 1 pixel both ways, zeros moved in."""
    num = len(images)
    padded = functional.pad(images, (1, 1, 1, 1))[:, 0]
    rows = torch.randint(0, 3, (num, 1, 1)) + torch.arange(8).view(1, 8, 1)
    columns = torch.randint(0, 3, (num, 1, 1)) + torch.arange(8).view(1, 1, 8)
    return padded[torch.arange(num).view(num, 1, 1), rows, columns].unsqueeze(1)


def train(arrays: dict[str, np.ndarray], seed: int) -> DigitsNet:
    """A net trained on `arrays`. Equal seeds give equal weights on one machine with one torch version."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(mode=True)
    images, labels = torch.from_numpy(arrays["image"]), torch.from_numpy(arrays["label"])
    net = DigitsNet()
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=1e-2)
    num_steps = NUM_EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=num_steps)
    for _ in range(NUM_EPOCHS):
        # The last, short batch is left out: its BatchNorm statistics would be noise.
        for batch in torch.randperm(len(images))[: len(images) // BATCH * BATCH].view(-1, BATCH):
            loss = functional.cross_entropy(net(shifted(images[batch])), labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()
    return net


def onnx_bytes(net: DigitsNet) -> bytes:
    """`net` as ONNX, BatchNorm folded into the convolutions; nothing in it tells where it was made."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        path = Path(folder, "model.onnx")
        # Deprecated, but it writes opset 17 and the symbol `batch` as asked, and no stack traces of this machine.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            net,
            (torch.zeros(1, 1, 8, 8),),
            path,
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
            opset_version=OPSET,
            dynamo=False,
        )
        model = onnx.load(path)
    for node in model.graph.node:
        node.ClearField("doc_string")
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def accuracy(model: bytes, arrays: dict[str, np.ndarray]) -> float:
    """Share of `arrays` that onnxruntime classifies rightly, 0..1."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"image": arrays["image"]})
    return float(np.mean(logits.argmax(axis=1) == arrays["label"]))


def main() -> None:
    """Data, training, export, measurement."""
    parser = argparse.ArgumentParser(description="Train the quickstart's digit classifier.")
    parser.add_argument("--output", type=Path, default=ROOT / "configs" / "models" / "digits.onnx", help="ONNX file")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and shifts")
    arguments = parser.parse_args()
    start = time.perf_counter()
    training, held_out = load_split()
    write_atomically(DATA_FOLDER / "train.npz", npz_bytes(training))
    write_atomically(DATA_FOLDER / "eval.npz", npz_bytes(held_out))
    model = onnx_bytes(train(training, arguments.seed))
    write_atomically(arguments.output, model)
    print(f"{arguments.output}: {len(model):,} bytes, {time.perf_counter() - start:.0f} s")
    print(f"train accuracy {accuracy(model, training):.2%} of {len(training['label']):,}")
    print(f"eval accuracy  {accuracy(model, held_out):.2%} of {len(held_out['label']):,}")


if __name__ == "__main__":
    main()
