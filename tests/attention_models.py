"""A tiny randomly initialised model of transformers for each attention class of the table of families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="these are models of transformers")

BATCH, LENGTH, VOCABULARY = 2, 7, 40
#: Under the names that configs of most families have.
PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**PLAIN, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * 2}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
IMAGES = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "num_decoder_layers": 2, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip

#: Attention class -> name of the model class, arguments of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertAttention": ("BertForSequenceClassification", PLAIN),
    "BertGenerationAttention": ("BertGenerationEncoder", PLAIN),
    "CamembertAttention": ("CamembertModel", PLAIN),
    "ElectraAttention": ("ElectraModel", {**PLAIN, "embedding_size": 32}),
    "ErnieAttention": ("ErnieModel", PLAIN),
    "RobertaAttention": ("RobertaModel", PLAIN),
    "XLMRobertaAttention": ("XLMRobertaModel", PLAIN),
    "AlbertAttention": ("AlbertModel", {**PLAIN, "embedding_size": 16}),
    "DistilBertSelfAttention": (
        "DistilBertForSequenceClassification",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 24, "n_heads": 4, "n_layers": 2},
    ),
    "ModernBertAttention": (
        "ModernBertModel",
        {**PLAIN, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "ViTAttention": ("ViTForImageClassification", IMAGES),
    "DeiTAttention": ("DeiTModel", IMAGES),
    "Dinov2Attention": ("Dinov2Model", {**IMAGES, "mlp_ratio": 1}),
    "ViTMAEAttention": ("ViTMAEModel", {**IMAGES, "mask_ratio": 0.0}),
    "GPT2Attention": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "T5Attention": ("T5ForConditionalGeneration", T5),
    "MT5Attention": ("MT5ForConditionalGeneration", T5),
    "BartAttention": ("BartForConditionalGeneration", SEQ2SEQ),
    "MBartAttention": ("MBartForConditionalGeneration", SEQ2SEQ),
    "MarianAttention": ("MarianMTModel", SEQ2SEQ),
    "PegasusAttention": ("PegasusForConditionalGeneration", SEQ2SEQ),
    "EuroBertAttention": ("EuroBertModel", GROUPED),
    "Gemma3Attention": ("Gemma3ForCausalLM", {**GROUPED, **LOCAL}),
    "GemmaAttention": ("GemmaForCausalLM", GROUPED),
    "GraniteAttention": ("GraniteForCausalLM", GROUPED),
    "LlamaAttention": ("LlamaForCausalLM", {**GROUPED, "attention_bias": True}),
    "MinistralAttention": ("MinistralForCausalLM", GROUPED),
    "MistralAttention": ("MistralForCausalLM", GROUPED),
    "MixtralAttention": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 2}),
    "Qwen2Attention": ("Qwen2ForCausalLM", GROUPED),
    "Qwen2MoeAttention": ("Qwen2MoeForCausalLM", {**GROUPED, **EXPERTS}),
    "Qwen3Attention": ("Qwen3ForCausalLM", GROUPED),
    "Qwen3MoeAttention": ("Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS}),
    "SmolLM3Attention": ("SmolLM3ForCausalLM", GROUPED),
    "Starcoder2Attention": ("Starcoder2ForCausalLM", GROUPED),
    "Qwen3NextAttention": ("Qwen3NextForCausalLM", {**GROUPED, **EXPERTS, **FULL}),
    "Qwen3_5Attention": ("Qwen3_5ForCausalLM", {**GROUPED, **FULL}),
    "Qwen3_5MoeAttention": ("Qwen3_5MoeForCausalLM", {**GROUPED, **EXPERTS, **FULL}),
    "AfmoeAttention": ("AfmoeForCausalLM", {**GROUPED, **LOCAL, "num_dense_layers": 2}),
    "HrmTextAttention": ("HrmTextForCausalLM", {**PLAIN, "head_dim": 8}),
    "MuseGlimmerTextAttention": ("MuseGlimmerTextModel", {**GROUPED, **LOCAL}),
    "BeamAttention": ("BeamForCausalLM", {**GROUPED, **LOCAL}),
    "LagunaAttention": ("LagunaForCausalLM", {**GROUPED, **EXPERTS}),
    "Lfm3Attention": ("Lfm3ForCausalLM", {**GROUPED, **FULL}),
    "Step3p7Attention": ("Step3p7TextModel", {**GROUPED, **LOCAL}),
}


def make(attention: str, attention_function: str | None = None, **changes: Any) -> Any:
    """The model of this attention class, in evaluation mode; `changes` of its config."""
    name, arguments = MODELS[attention]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**arguments, **changes})).eval()
    model.config._experts_implementation = "eager"  # the default has no float64
    with torch.no_grad():
        for parameter in model.parameters():  # biases start at 0, which hides what is done to them
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if attention_function is not None:
        model.set_attn_implementation(attention_function)
    return model


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Arguments of `model(...)`: padding on one of two rows of tokens, images, a source and a target."""
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        images = torch.randn(BATCH, 3, 8, 8, generator=generator)
        return {"pixel_values": images.to(model.dtype)}
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    real = torch.ones_like(tokens)
    real[1, -2:] = 0
    inputs = {"input_ids": tokens, "attention_mask": real}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (BATCH, 5), generator=generator)
    return inputs


def output_of(model: Any) -> Tensor:
    """Logits, or the last hidden states, of rows that are no padding."""
    inputs = inputs_of(model)
    torch.manual_seed(2)  # ViTMAE shuffles its patches
    output = model(**inputs)
    rows: Tensor = output.logits if "logits" in output else output.last_hidden_state
    real = inputs.get("attention_mask")
    return rows if real is None or rows.shape[:2] != real.shape else rows[real.bool()]
