"""The PyTorch models of README's figures, to be measured beside their engines. Weights are random.

    trtforge bench MANIFEST --shapes batch=1,8,32 --spec SPEC --peer-python PYTHON

where SPEC says `model: {torch: {callable: scripts/bench/torch_peer.py:resnet50}}`, and PYTHON has torch, transformers and
torchvision. Attention is transformers' default, torch's fused one. `PYTHON torch_peer.py resnet50 FILE` writes an ONNX file of
opset 17, the latest that TensorRT 8.6 reads.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

Parts = dict[str, Any]

INTENT = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 256,
}


class Encoder(torch.nn.Module):  # type: ignore[misc]
    """A BERT encoder: last hidden state (batch, seq, hidden) and pooled output (batch, hidden)."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel  # noqa: PLC0415 - resnet50 needs none

        self.bert = BertModel(BertConfig(**sizes))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of token ids and a mask, (batch, seq) int64 each."""
        encoded = self.bert(input_ids, attention_mask)
        return encoded.last_hidden_state, encoded.pooler_output


def bert_base() -> Parts:
    """BERT-base."""
    return _text(Encoder())


def bert_intent() -> Parts:
    """The encoder of configs/bert-intent.yaml, whose heads are two small matrices."""
    return _text(Encoder(**INTENT))


def resnet50() -> Parts:
    """ResNet-50, whose batch normalizations are as different as those of a trained one, so that no biases are shared."""
    import torchvision  # noqa: PLC0415 - BERT needs none

    image = torch.randn(2, 3, 224, 224)
    model = torchvision.models.resnet50(weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.bias, std=0.1)
            torch.nn.init.normal_(module.running_mean, std=0.1)
    return {"model": model, "example_inputs": {"image": image}, "dynamic_axes": {"image": {0: "batch"}}}


def _text(model: torch.nn.Module) -> Parts:
    names = ("input_ids", "attention_mask")
    return {
        "model": model,
        "example_inputs": {name: torch.ones(2, 16, dtype=torch.int64) for name in names},
        "dynamic_axes": {name: {0: "batch", 1: "seq"} for name in names},
    }


def export(name: str, path: str) -> None:
    """Writes one of the models as ONNX."""
    parts = {"resnet50": resnet50, "bert_base": bert_base, "bert_intent": bert_intent}[name]()
    torch.onnx.export(
        parts["model"].eval(),
        tuple(parts["example_inputs"].values()),
        path,
        input_names=list(parts["example_inputs"]),
        dynamic_axes=parts["dynamic_axes"],
        opset_version=17,
        dynamo=False,
    )


if __name__ == "__main__":
    export(*sys.argv[1:])
