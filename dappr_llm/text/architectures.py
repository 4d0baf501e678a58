"""Model configs and dataset sizes of shipped recipes, so that `dappr plan` works on them without the Hub."""

from __future__ import annotations

from typing import Any

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-v0.1": {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
}

# Training rows of tasks, for planning without the data.
TRAIN_ROWS = {"obqa": 4957, "arc_c": 1119, "arc_e": 2251, "csqa": 9741}
