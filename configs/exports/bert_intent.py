"""A small BERT with two heads, as it is used to understand requests: what is wanted (intent), and with what (slots).

The weights are random, from a fixed seed, so nothing is downloaded. Replace `_model` by your own; see configs/bert-intent.yaml.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertModel

NUM_INTENTS = 24
NUM_SLOTS = 31
_CONFIG = BertConfig(
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=1024,
    max_position_embeddings=256,
    attn_implementation="eager",
)


class IntentAndSlots(torch.nn.Module):
    """BERT, and a linear head each for the whole request and for every token of it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = BertModel(config)
        self.dropout = torch.nn.Dropout(0.1)
        self.intent = torch.nn.Linear(config.hidden_size, NUM_INTENTS)
        self.slot = torch.nn.Linear(config.hidden_size, NUM_SLOTS)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits of the intent (batch, 24) and of each token's slot (batch, sequence, 31).

        Args:
            input_ids: (batch, sequence), int64, 0 to 8191.
            attention_mask: (batch, sequence), int64, 1 for tokens and 0 for padding.
        """
        encoded = self.bert(input_ids, attention_mask)
        return {
            "intent_logits": self.intent(self.dropout(encoded.pooler_output)),
            "slot_logits": self.slot(self.dropout(encoded.last_hidden_state)),
        }


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return IntentAndSlots(_CONFIG).eval()


def build() -> dict[str, Any]:
    """What `model.torch.callable` of a spec has to return."""
    axes = {0: "batch", 1: "sequence"}
    return {
        "model": _model(),
        "example_inputs": {
            "input_ids": torch.arange(2 * 16).reshape(2, 16),
            "attention_mask": torch.ones(2, 16, dtype=torch.int64),
        },
        "dynamic_axes": {"input_ids": axes, "attention_mask": axes},
    }
