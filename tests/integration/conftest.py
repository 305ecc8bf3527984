"""Real models, fetched into `tests/models/<package>/`."""

from __future__ import annotations

from pathlib import Path

import pytest

MODELS = Path(__file__).parents[1] / "models"
FILES = {
    "ocr_rec": "rapidocr_onnxruntime/ch_PP-OCRv4_rec_infer.onnx",
    "ocr_det": "rapidocr_onnxruntime/ch_PP-OCRv4_det_infer.onnx",
    "ocr_cls": "rapidocr_onnxruntime/ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "magika": "magika/model.onnx",
    "silero_sequence": "silero_vad/silero_vad_16k_sequence.onnx",
    "silero_openvino": "silero_vad/silero_vad_openvino_16k.onnx",
    "silero": "silero_vad/silero_vad.onnx",
    "silero_half": "silero_vad/silero_vad_half.onnx",
    "silero_op15": "silero_vad/silero_vad_16k_op15.onnx",
    "silero_op18": "silero_vad/silero_vad_op18_ifless.onnx",
}


@pytest.fixture(scope="session")
def model_path():
    """Path of a real model by its name in FILES."""

    def path_of(name):
        path = MODELS / FILES[name]
        if not path.is_file():
            pytest.fail(f"{path} is not there; fetch it with: python scripts/fetch_test_models.py")
        return path

    return path_of
