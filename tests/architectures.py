"""Tiny random models of the architectures that docs/models.md names; nothing is downloaded."""

from dataclasses import dataclass

import torch
import transformers as hf

SIZE = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 2, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """
    One row of the table.

    Args:
        models (`str`):
            Which published models it stands for.
        config (`type`), options (`dict`):
            Its config class and what its tiny form has besides `SIZE`.
        decoder (`bool`):
            A causal LM; otherwise an encoder.
        packed (`bool`):
            Whether batches are computed without padding.
    """

    models: str
    config: type
    options: dict
    decoder: bool
    packed: bool

    def tiny(self):
        return self.config(**{**SIZE, **self.options})


ARCHITECTURES = {
    "Llama": Architecture("SmolLM2, Llama 3", hf.LlamaConfig, {**GROUPED, "rope_parameters": LLAMA3}, True, True),
    "Mistral": Architecture("Mistral", hf.MistralConfig, {**GROUPED, "sliding_window": 6}, True, True),
    "Qwen3": Architecture("Qwen3", hf.Qwen3Config, GROUPED, True, True),
    "Qwen3-MoE": Architecture("Qwen3 mixtures of experts", hf.Qwen3MoeConfig, {**GROUPED, **EXPERTS}, True, True),
    "Gemma 3": Architecture("Gemma 3 (text)", hf.Gemma3TextConfig, {**GROUPED, "sliding_window": 6}, True, True),
    "Phi-3": Architecture("Phi-3, Phi-4", hf.Phi3Config, {key: value for key, value in GROUPED.items() if key != "head_dim"}, True, True),
    "GPT-2": Architecture(
        "GPT-2", hf.GPT2Config, {"n_inner": 48, "bos_token_id": 2, "eos_token_id": 2}, True, True
    ),
    "BERT": Architecture("BERT", hf.BertConfig, {}, False, False),
    "RoBERTa": Architecture("RoBERTa, XLM-R", hf.RobertaConfig, {}, False, False),
    "ModernBERT": Architecture(
        "ModernBERT", hf.ModernBertConfig, {"cls_token_id": 2, "sep_token_id": 1, "local_attention": 8}, False, False
    ),
    "DeBERTa": Architecture("DeBERTa v2, v3", hf.DebertaV2Config, {"relative_attention": True,
        "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "norm_rel_ebd": "layer_norm",
        "position_buckets": 16, "share_att_key": True}, False, False),
}  # fmt: skip


def build_lm(name, seed=0):
    torch.manual_seed(seed)
    return hf.AutoModelForCausalLM.from_config(ARCHITECTURES[name].tiny()).eval()


def save_base(name, folder, tokenizer):
    """A folder with a base model as it is published: a causal or masked LM and its tokenizer."""
    torch.manual_seed(0)
    chosen = ARCHITECTURES[name]
    kind = hf.AutoModelForCausalLM if chosen.decoder else hf.AutoModelForMaskedLM
    kind.from_config(chosen.tiny()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def table():
    """The rows of the table in docs/models.md."""
    rows = [
        "| architecture | models | `letters` and `tokens` | `head` | batches | chat template |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, chosen in ARCHITECTURES.items():
        vocabulary = "yes" if chosen.decoder else "no: not a causal LM"
        batches = "packed, common prefixes once" if chosen.packed else "padded, by length"
        chat = "where the tokenizer has one" if chosen.decoder else "–"
        rows.append(f"| {name} | {chosen.models} | {vocabulary} | yes | {batches} | {chat} |")
    return "\n".join(rows) + "\n"
