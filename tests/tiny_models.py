"""A tiny random model of every family of transformers that the package is tested with, and a padded batch for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Heads that read four keys and values of two, narrow layers, no dropout.
PLAIN = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**PLAIN, "num_key_value_heads": 2, "head_dim": 8}
LOCAL = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
DENSE_MLP = {"mlp_layer_types": ["dense", "dense"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": 40, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
IMAGES = {
    "image_size": 12, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 24, **NO_DROPOUT,
}  # fmt: skip
T5 = {
    "vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """Model class, config class and its arguments."""

    model: str
    config: str
    arguments: dict[str, Any] = field(default_factory=dict)


TINY = {
    "bert": Tiny("BertModel", "BertConfig", PLAIN | NO_DROPOUT),
    "roberta": Tiny("RobertaModel", "RobertaConfig", PLAIN | NO_DROPOUT),
    "electra": Tiny("ElectraModel", "ElectraConfig", PLAIN | NO_DROPOUT | {"embedding_size": 16}),
    "distilbert": Tiny(
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 40, "dim": 32, "hidden_dim": 24, "n_layers": 2, "n_heads": 4}
        | {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64},
    ),
    "albert": Tiny("AlbertModel", "AlbertConfig", PLAIN | NO_DROPOUT | {"embedding_size": 16}),
    "modernbert": Tiny(
        "ModernBertModel",
        "ModernBertConfig",
        PLAIN | {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "vit": Tiny("ViTModel", "ViTConfig", IMAGES),
    "deit": Tiny("DeiTModel", "DeiTConfig", IMAGES),
    "gpt2": Tiny(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 40, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": Tiny("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": Tiny("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 4}),
    "qwen2": Tiny("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": Tiny("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "gemma3_text": Tiny("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | LOCAL),
    "bart": Tiny("BartModel", "BartConfig", SEQ2SEQ),
    "marian": Tiny("MarianModel", "MarianConfig", SEQ2SEQ),
    "t5": Tiny("T5Model", "T5Config", T5),
    "mt5": Tiny("MT5Model", "MT5Config", T5),
    "afmoe": Tiny("AfmoeForCausalLM", "AfmoeConfig", GROUPED | LOCAL | {"num_dense_layers": 2}),
    "bailing_hybrid": Tiny(
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        PLAIN
        | DENSE_MLP
        | {"num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
        | {"v_head_dim": 6, "qk_nope_head_dim": 8, "head_dim": 8, "num_mtp_layers": 0}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "beam": Tiny("BeamForCausalLM", "BeamConfig", GROUPED | LOCAL | DENSE_MLP),
    "hrm_text": Tiny("HrmTextForCausalLM", "HrmTextConfig", PLAIN | {"head_dim": 8}),
    "laguna": Tiny("LagunaForCausalLM", "LagunaConfig", GROUPED | LOCAL | DENSE_MLP),
    "lfm3": Tiny("Lfm3ForCausalLM", "Lfm3Config", GROUPED | LOCAL),
    "muse_glimmer_text": Tiny("MuseGlimmerTextModel", "MuseGlimmerTextConfig", GROUPED | LOCAL),
    "qwen3_next": Tiny("Qwen3NextForCausalLM", "Qwen3NextConfig", GROUPED | LINEAR | EXPERTS),
    "qwen3_5_text": Tiny("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", GROUPED | LINEAR),
    "qwen3_5_moe_text": Tiny(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", GROUPED | LINEAR | EXPERTS
    ),
    "step3p7_text": Tiny("Step3p7TextModel", "Step3p7TextConfig", GROUPED | LOCAL | DENSE_MLP),
    "muse_spark_text": Tiny(
        "MuseSparkTextModel", "MuseSparkTextConfig", GROUPED | LOCAL | DENSE_MLP
    ),
    "neomme": Tiny(
        "NeoMMEModel", "NeoMMEConfig", GROUPED | LOCAL | {"head_dim": 16, "embedding_rank": 16}
    ),
}


def build(name: str, **changes: Any) -> Any:
    """The model of a family in eval mode, with stock eager attention and weights that spread its logits."""
    import transformers

    tiny = TINY[name]
    config = getattr(transformers, tiny.config)(**(tiny.arguments | changes))
    model = getattr(transformers, tiny.model)(config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.15)
    return model.eval()


def batch(name: str, T: int = 9) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of `model(...)`, a row whole, one padded on the right and one on the left; and its real tokens.

    Those are bool `[B, T]` of the rows that `model(...)` returns.
    """
    if "image_size" in TINY[name].arguments:
        return {"pixel_values": torch.randn(2, 3, 12, 12)}, torch.ones(2, 1, dtype=torch.bool)
    real = torch.ones(3, T, dtype=torch.long)
    real[1, T - 3 :] = 0
    real[2, :2] = 0
    arguments = {"input_ids": torch.randint(3, 40, (3, T)), "attention_mask": real}
    if not is_seq2seq(name):
        return arguments, real.bool()
    decoded = torch.ones(3, 5, dtype=torch.long)
    decoded[0, 3:] = 0
    targets = {"decoder_input_ids": torch.randint(3, 40, (3, 5)), "decoder_attention_mask": decoded}
    return arguments | targets, decoded.bool()


def is_seq2seq(name: str) -> bool:
    return "decoder_start_token_id" in TINY[name].arguments


def outputs(model: Any, arguments: dict[str, Any], real: Tensor) -> Tensor:
    """What a model says of its real tokens, `[tokens, width]`."""
    values = model(**arguments)[0]
    return values[real.expand(values.shape[:2])]


def with_gradients(
    model: Any, arguments: dict[str, Any], real: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """`outputs`, and the gradient of every parameter under a loss that weighs each of them differently."""
    model.zero_grad(set_to_none=True)
    values = outputs(model, arguments, real)
    weights = torch.linspace(-1.0, 1.0, values.numel(), dtype=values.dtype).view(values.shape)
    (values * weights).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return values.detach(), gradients


def assert_alike(found: Any, expected: Any, tolerance: float = 1e-5, name: str = "outputs") -> None:
    """Tensors, or dicts of them, equal to `tolerance` of the largest number of each."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_alike(found[name], tensor, tolerance, name)
        return
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        found, expected, rtol=0.0, atol=tolerance * largest, msg=lambda told: f"{name}: {told}"
    )
