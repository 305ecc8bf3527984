"""The OCR recogniser that the benchmarks build, and its shapes. Fetch it with: python scripts/fetch_test_models.py."""

from __future__ import annotations

import json
from pathlib import Path

from programs import ROOT

MODEL = ROOT / "tests" / "models" / "rapidocr_onnxruntime" / "ch_PP-OCRv4_rec_infer.onnx"
SHAPES = {"min": (1, 3, 48, 48), "opt": (4, 3, 48, 320), "max": (8, 3, 48, 640)}


def write_spec(folder: Path) -> Path:
    """A spec in `folder` that builds the model for sm86 into `folder/out`. JSON is YAML too."""
    spec = {
        "version": 1,
        "name": "ocr",
        "model": {"onnx": str(MODEL)},
        "profiles": [{"inputs": {"x": {point: list(shape) for point, shape in SHAPES.items()}}}],
        "targets": [{"backend": "tensorrt_rtx", "gpus": ["sm86"]}],
        "output": "out",
    }
    path = folder / "ocr.yaml"
    path.write_text(json.dumps(spec))
    return path
