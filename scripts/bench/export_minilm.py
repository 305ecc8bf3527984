"""Exports all-MiniLM-L6-v2 to ONNX. Run by calibration.py, in an environment with torch, transformers and safetensors.

python export_minilm.py MODEL.onnx
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "integration" / "exports"))

import minilm  # type: ignore[import-not-found]  # found by the path above

if __name__ == "__main__":
    model, inputs, axes = minilm.build()
    torch.onnx.export(
        model,
        tuple(inputs.values()),
        sys.argv[1],
        input_names=list(inputs),
        output_names=["embedding"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
