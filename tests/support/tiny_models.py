"""A tiny random model of every family of transformers that the package is tested with, and a padded batch for it."""

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.integrations.transformers.unpadding import UNPADDED
from tests.support.alike import assert_alike
from tests.support.nn_layers import backward

DOCUMENT = Path(__file__).parents[2] / "docs" / "transformers.md"
transformers = pytest.importorskip("transformers", reason="needs the extra [transformers]")
transformers.logging.set_verbosity_error()

#: Sizes by the names that configs have for them.
SMALL = {
    "vocab_size": 40, "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64,
    "max_source_positions": 64, "max_target_positions": 64, "sliding_window": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "word_embed_proj_dim": 32,
    "embedding_size": 16, "projection_dim": 16, "d_kv": 8, "rotary_dim": 4,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "intermediate_size": 24, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_ff": 24, "hidden_dim": 24,
    "ffn_dim": 24, "mlp_dim": 24, "mlp_ratio": 1, "expansion_ratio": 1,
    "image_size": 12, "patch_size": 4, "num_mel_bins": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "moe_num_experts": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def small_config(config_class: Any) -> dict[str, Any]:
    """Arguments that make a config small: sizes, heads that are grouped where they are by default, kinds of layers."""
    whole = config_class()
    names = vars(whole).keys() - config_class.attribute_map.keys()
    found = {name: size for name, size in SMALL.items() if name in names}
    if (groups := getattr(whole, "num_key_value_heads", None)) is not None:
        heads = 8 if getattr(whole, "head_dim", None) is not None else 4
        found["num_attention_heads"] = heads
        found["num_key_value_heads"] = heads if groups == whole.num_attention_heads else 2
        found |= {"head_dim": 4} if heads == 8 else {}
    if kinds := getattr(whole, "layer_types", None):
        found["layer_types"] = [*dict.fromkeys(kinds), kinds[0]][:2]
    if kinds := getattr(whole, "mlp_layer_types", None):
        found["mlp_layer_types"] = ["dense" if "dense" in kinds else kinds[0]] * 2
    return found


GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
WHOLE = GROUPED | {"sliding_window": None}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
CAPPED = {"attn_logit_softcapping": 2.0}  # low enough to change small scores
T5GEMMA = small_config(transformers.T5GemmaModuleConfig) | CAPPED
STARTS = {"decoder_start_token_id": 0}
GEMMA3N = {
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40,
    "laurel_rank": 8, "altup_num_inputs": 2,
}  # fmt: skip
LAYOUTLM3 = {"coordinate_size": 6, "shape_size": 4, "visual_embed": False, "rel_pos_bins": 8, "rel_2d_pos_bins": 8}
SWIN = {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [4, 4], "window_size": 3, "mlp_ratio": 1.0}
SWITCH = STARTS | {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
BAILING_HYBRID = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "qk_nope_head_dim": 8, "num_mtp_layers": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A model class, the class whose heads are known in its weights ("": none), and what its config has of its own."""

    model: str
    attention: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


TINY = {
    "albert": Tiny("AlbertModel", "AlbertAttention"),
    "beit": Tiny("BeitModel", "BeitAttention", {"use_relative_position_bias": True}),
    "bloom": Tiny("BloomForCausalLM"),
    "layoutlmv3": Tiny("LayoutLMv3Model", "LayoutLMv3SelfAttention", LAYOUTLM3),
    "mpnet": Tiny("MPNetModel"),
    "mpt": Tiny("MptForCausalLM"),
    "swin": Tiny("SwinModel", "SwinAttention", SWIN),
    "swinv2": Tiny("Swinv2Model", changes=SWIN),
    "bert": Tiny("BertModel", "BertAttention"),
    "bert-generation": Tiny("BertGenerationEncoder", "BertGenerationAttention"),
    "camembert": Tiny("CamembertModel", "CamembertAttention"),
    "distilbert": Tiny("DistilBertModel", "DistilBertSelfAttention"),
    "electra": Tiny("ElectraModel", "ElectraAttention"),
    "ernie": Tiny("ErnieModel", "ErnieAttention"),
    "modernbert": Tiny("ModernBertModel", "ModernBertAttention", {"local_attention": 4}),
    "roberta": Tiny("RobertaModel", "RobertaAttention"),
    "xlm-roberta": Tiny("XLMRobertaModel", "XLMRobertaAttention"),
    "deit": Tiny("DeiTModel", "DeiTAttention"),
    "dinov2": Tiny("Dinov2Model", "Dinov2Attention"),
    "vit": Tiny("ViTModel", "ViTAttention"),
    "vit_mae": Tiny("ViTMAEModel", "ViTMAEAttention", {"mask_ratio": 0.0}),
    "bart": Tiny("BartModel", "BartAttention"),
    "marian": Tiny("MarianModel", "MarianAttention"),
    "mbart": Tiny("MBartForConditionalGeneration", "MBartAttention"),
    "longt5": Tiny("LongT5Model", changes=STARTS | {"local_radius": 4}),
    "mt5": Tiny("MT5Model", "MT5Attention", STARTS),
    "pegasus": Tiny("PegasusForConditionalGeneration", "PegasusAttention"),
    "switch_transformers": Tiny("SwitchTransformersModel", "SwitchTransformersAttention", SWITCH),
    "t5": Tiny("T5Model", "T5Attention", STARTS),
    "umt5": Tiny("UMT5Model", changes=STARTS),
    "eurobert": Tiny("EuroBertModel", "EuroBertAttention", GROUPED),
    "gemma": Tiny("GemmaForCausalLM", "GemmaAttention", GROUPED),
    "flint": Tiny("FlintForCausalLM", "FlintAttention", LOCAL),
    "gemma2": Tiny("Gemma2ForCausalLM", "Gemma2Attention", CAPPED),
    "gemma3_text": Tiny("Gemma3ForCausalLM", "Gemma3Attention"),
    "gpt2": Tiny("GPT2LMHeadModel", "GPT2Attention"),
    "gemma3n_text": Tiny("Gemma3nForCausalLM", "Gemma3nTextAttention", GEMMA3N),
    "gpt_oss": Tiny("GptOssForCausalLM", "GptOssAttention"),
    "granite_swa": Tiny("GraniteSWAForCausalLM", "GraniteSWAAttention", GROUPED | LOCAL),
    "granitemoe_swa": Tiny("GraniteMoeSWAForCausalLM", "GraniteMoeSWAAttention", GROUPED | LOCAL),
    "mimo_v2_flash": Tiny("MiMoV2FlashForCausalLM", "MiMoV2FlashAttention", LOCAL | {"v_head_dim": 4}),
    "openai_privacy_filter": Tiny("OpenAIPrivacyFilterModel", "OpenAIPrivacyFilterAttention"),
    "t5gemma": Tiny("T5GemmaModel", "T5GemmaSelfAttention", dict.fromkeys(("encoder", "decoder"), T5GEMMA)),
    "vaultgemma": Tiny("VaultGemmaForCausalLM", "VaultGemmaAttention", CAPPED),
    "granite": Tiny("GraniteForCausalLM", "GraniteAttention", GROUPED),
    "llama": Tiny("LlamaForCausalLM", "LlamaAttention", GROUPED | {"attention_bias": True}),
    "ministral": Tiny("MinistralForCausalLM", "MinistralAttention", GROUPED),
    "mistral": Tiny("MistralForCausalLM", "MistralAttention"),
    "mixtral": Tiny("MixtralForCausalLM", "MixtralAttention", WHOLE),
    "qwen2": Tiny("Qwen2ForCausalLM", "Qwen2Attention", GROUPED),
    "qwen2_moe": Tiny("Qwen2MoeForCausalLM", "Qwen2MoeAttention", GROUPED),
    "qwen3": Tiny("Qwen3ForCausalLM", "Qwen3Attention", GROUPED),
    "qwen3_moe": Tiny("Qwen3MoeForCausalLM", "Qwen3MoeAttention", GROUPED),
    "smollm3": Tiny("SmolLM3ForCausalLM", "SmolLM3Attention", WHOLE),
    "starcoder2": Tiny("Starcoder2ForCausalLM", "Starcoder2Attention", WHOLE),
    "afmoe": Tiny("AfmoeForCausalLM", "AfmoeAttention", GROUPED | {"num_dense_layers": 2}),
    "bailing_hybrid": Tiny("BailingHybridForCausalLM", changes=BAILING_HYBRID),
    "beam": Tiny("BeamForCausalLM", "BeamAttention"),
    "hrm_text": Tiny("HrmTextForCausalLM", "HrmTextAttention", {"head_dim": 8}),
    "laguna": Tiny("LagunaForCausalLM", "LagunaAttention", LOCAL),
    "lfm3": Tiny("Lfm3ForCausalLM", "Lfm3Attention", LOCAL),
    "muse_glimmer_text": Tiny("MuseGlimmerTextModel", "MuseGlimmerTextAttention"),
    "muse_spark_text": Tiny("MuseSparkTextModel", changes={"mlp_layer_types": ["dense", "dense"]}),
    "neomme": Tiny("NeoMMEModel", changes={"head_dim": 16, "embedding_rank": 16}),
    "qwen3_5_moe_text": Tiny("Qwen3_5MoeForCausalLM", "Qwen3_5MoeAttention", LINEAR),
    "qwen3_5_text": Tiny("Qwen3_5ForCausalLM", "Qwen3_5Attention", LINEAR),
    "qwen3_next": Tiny("Qwen3NextForCausalLM", "Qwen3NextAttention", LINEAR),
    "step3p7_text": Tiny("Step3p7TextModel", "Step3p7Attention", LOCAL),
}
#: Those that `make test` runs: a layer that runs twice, two stacks, fused projections, rotary positions, images ...
FEW = {"albert", "bart", "bert", "gpt2", "llama", "t5", "vit"}
#: Those whose heads are known in their weights.
WITH_HEADS = [name for name, tiny in TINY.items() if tiny.attention]


def build(name: str, attention: str = "eager", *, model: str = "", **changes: Any) -> Any:
    """The model of a family, the same every time, in evaluation mode.

    `attention` is its attention function ("eager" in place of an "sdpa" that can't serve it), `model` another class of
    the family, `changes` are of its config.
    """
    tiny = TINY[name]
    model = model or tiny.model
    if attention == "sdpa" and not getattr(transformers, model)._supports_sdpa:
        attention = "eager"
    return of_class(model, attention, **tiny.changes | changes)


def of_class(name: str, attention: str = "eager", seed: int = 0, **changes: Any) -> Any:
    """A small random model of a class of transformers, whose biases are not 0, in evaluation mode."""
    assert hk.integrations.transformers  # registers "heads_kernels"
    model_class = getattr(transformers, name)
    config = model_class.config_class(**small_config(model_class.config_class) | changes)
    torch.manual_seed(seed)
    # The default function of experts has no float64.
    built = model_class._from_config(config, attn_implementation=attention, experts_implementation="eager")
    with torch.no_grad():
        for parameter in built.parameters():  # biases start at 0, which hides what is done to them
            if parameter.requires_grad:
                parameter.add_(0.15 * torch.randn_like(parameter))
    return built.eval()


def unpooled(model: Any) -> Any:
    """A model without the pooler, which reads the first token whether it is real or not."""
    if "add_pooling_layer" in inspect.signature(type(model)).parameters:
        model.pooler = None
    return model


# ---------------------------------------------------------------------- families of a form
#: Others whose attention has one of the forms of `hk.heads` (`FORMS` in heads/layouts.py): tested are outputs under
#: `use`, gates, closed and pruned heads, saving.
OF_A_FORM = (
    "aimv2_text_model", "aimv2_vision_model", "apertus", "arcee", "aria_text", "biogpt", "blenderbot",
    "blenderbot-small", "chinese_clip_vision_model", "clip_text_model", "clip_vision_model", "cohere",
    "cohere2", "cohere2_moe", "cwm", "data2vec-audio", "data2vec-text", "dinov2_with_registers", "dinov3_vit",
    "dpt", "emu3_text_model", "ernie4_5", "esm", "exaone4", "exaone_moe", "glm", "glm4", "glm4_moe",
    "glmasr_encoder", "granitemoe", "granitemoeshared", "gte", "helium", "hubert", "hy_v3", "hyperclovax",
    "ijepa", "jais2", "jina_embeddings_v3", "kolibri1", "layoutlm", "lfm2", "llama4_text", "m2m_100", "mellum",
    "minimax", "minimax_m3_vl_text", "ministral3", "mllama_text_model", "modernbert-decoder", "molmo2_text",
    "nanochat", "nemotron", "nomic_bert", "olmo", "opt", "owlv2_text_model", "owlv2_vision_model", "phi",
    "phimoe", "pixio", "pixtral", "plbart", "qwen2_audio_encoder", "qwen3_vl_moe_text", "qwen3_vl_text",
    "roberta-prelayernorm", "roc_bert", "sapiens2", "seed_oss", "sew", "siglip2_text_model",
    "siglip_text_model", "siglip_vision_model", "solar_open", "stablelm", "tipsv2_text_model",
    "tipsv2_vision_model", "ultrabert", "unispeech", "unispeech-sat", "vit_msn", "voxtral_encoder",
    "voxtral_realtime_encoder", "wav2vec2", "whisper", "xlm-roberta-xl",
)  # fmt: skip

#: Others whose heads are not known in their weights, because norms, rotations or other projections are over all of
#: them: tested are outputs under `use`, gates, closed heads and analysis.
ATTENTION_ALONE = (
    "bitnet", "blip_2_vision_model", "deepseek_v2", "diffllama", "esmc", "flex_olmo",
    "glm4_moe_lite", "gpt_bigcode", "gpt_neox", "instructblip_vision_model", "internvl_vision",
    "janus_vision_model", "minicpm3", "minimax_m2", "mistral4", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "persimmon", "phi3", "qianfan_ocr_vision", "sam3_vit_model", "wav2vec2-conformer",
)  # fmt: skip

#: What sizes alone don't make small or whole.
PARTICULAR: dict[str, dict[str, Any]] = {"nemotron": {"num_key_value_heads": 2, "head_dim": 8}}


def small(model_type: str, attention: str = "eager", seed: int = 0) -> Any:
    """The model of a family without a head for a task."""
    stem = transformers.CONFIG_MAPPING[model_type].__name__.removesuffix("Config")
    name = f"{stem}Model" if hasattr(transformers, f"{stem}Model") else stem
    return of_class(name, attention, seed, **PARTICULAR.get(model_type, {}))


def documented() -> dict[str, list[str]]:
    """Of each family in the table of docs/transformers.md the columns: model, scores, output gate, head masks ..."""
    document = DOCUMENT.read_text(encoding="utf-8")
    rows = [row.split("|")[1:-1] for row in document.splitlines() if row.startswith("| `")]
    return {name.strip(" `"): [column.strip(" `") for column in columns] for name, *columns in rows}


def batch(model: Any) -> dict[str, Tensor]:
    """Arguments of `model(...)`: images, sounds, or rows of 9 tokens: whole, padded on the right, on the left.

    The decoder of a model that has one reads 5 tokens.
    """
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator).to(model.dtype)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 400, generator=generator)}
    if model.main_input_name == "input_features":
        spectrum = torch.randn(2, model.config.num_mel_bins, 128, generator=generator)
        decoder = {"decoder_input_ids": torch.randint(3, 40, (2, 5), generator=generator)}
        return {"input_features": spectrum} | (decoder if model.config.is_encoder_decoder else {})
    tokens = torch.randint(3, 40, (3, 14), generator=generator)
    real = torch.ones_like(tokens)
    real[1, 6:9] = real[2, :2] = real[0, 12:] = 0
    if model.dtype == torch.float64:  # stock eager attention makes NaN of rows that see nothing
        real[1, 6] = real[2, :2] = 1
    arguments = {"input_ids": tokens[:, :9], "attention_mask": real[:, :9]}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = tokens[:, 9:]
        arguments["decoder_attention_mask"] = real[:, 9:]
    return arguments


#: Models whose layers take no padding mask: images all of whose patches are real, and sounds of one length.
NO_PADDING = {
    "swin", "swinv2", "aimv2_vision_model", "chinese_clip_vision_model", "clip_vision_model",
    "dinov3_vit", "dpt", "glmasr_encoder", "owlv2_vision_model", "pixtral", "sapiens2", "siglip_vision_model",
    "blip_2_vision_model", "instructblip_vision_model", "internvl_vision", "janus_vision_model", "qianfan_ocr_vision",
    "sam3_vit_model",
}  # fmt: skip
#: Those of images whose layers take one that they are never given.
NEVER_PADDED = {
    "beit", "deit", "dinov2", "dinov2_with_registers", "ijepa", "pixio", "tipsv2_vision_model", "vit",
    "vit_mae", "vit_msn",
}  # fmt: skip
#: Those that take, or make, a mask of all pairs of tokens.
PAIRS = {"layoutlm", "qwen2_audio_encoder", "voxtral_encoder"}
#: Families whose pooled output is of a padded token unless the padding is on this side.
POOLED = {
    "altclip_text_model": "right", "aimv2_text_model": "right", "clip_text_model": "left",
    "owlv2_text_model": "left", "siglip_text_model": "left", "siglip2_text_model": "left",
}  # fmt: skip


def padding_of(name: str, model: Any) -> dict[str, Tensor]:
    """A padding mask for the batch of a model, if that has none: half of the second row."""
    arguments = batch(model)
    if name in POOLED:
        return {"attention_mask": padding(POOLED[name])}
    if name in NO_PADDING | NEVER_PADDED or "attention_mask" in arguments:
        return {}
    if "decoder_input_ids" in arguments:
        return {"decoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])}
    if "input_values" in arguments:
        length = arguments["input_values"].shape[1]
    elif name in PAIRS:
        length = arguments["input_features"].shape[2] // 2
    else:
        length = model(**arguments)[0].shape[1]
    real = torch.arange(length) < torch.tensor([[length], [length // 2]])
    if name in PAIRS:
        hidden = ~real[:, None, None].expand(2, 1, length, length)
        return {"attention_mask": torch.zeros(hidden.shape).masked_fill(hidden, -1e9)}
    return {"attention_mask": real.long()}


def outputs(model: Any, **changes: Any) -> Tensor:
    """What a model says of the real tokens of its batch, `[tokens, width]`; `changes` of the batch."""
    arguments = batch(model) | changes
    torch.manual_seed(2)  # ViTMAE shuffles its patches
    values: Tensor = model(**arguments)[0]
    real = arguments.get("decoder_attention_mask", arguments.get("attention_mask"))
    if real is not None and model.main_input_name == "input_values":  # of samples of a sound
        real = model._get_feature_vector_attention_mask(values.shape[1], real)
    whole = real is None or real.shape != values.shape[:2]
    return values.flatten(0, 1) if whole else values[real.bool()]


def with_gradients(model: Any, **changes: Any) -> dict[str, Tensor]:
    """`outputs`, and the gradient of every parameter under a loss that weighs each of them differently."""
    return backward(model, outputs(model, **changes))


def assert_same_states(loaded: nn.Module, saved: nn.Module, ignoring: str = "nothing") -> None:
    states = [dict(model.state_dict()) for model in (loaded, saved)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert ignoring in name or torch.equal(tensor, states[1][name]), name


def assert_same(loaded: nn.Module, saved: nn.Module) -> None:
    assert_same_states(loaded, saved)
    assert_alike(outputs(loaded), outputs(saved))


def padding(kind: str) -> Tensor:
    """Of 3 rows of 9 tokens: a row whole, the others padded on the left, on the right, or between real tokens."""
    real = torch.ones(3, 9, dtype=torch.long)
    if kind == "left":
        real[1, :5] = real[2, :2] = 0
    elif kind == "right":
        real[1, 2:] = real[2, 7:] = 0
    elif kind == "holes":
        real[1, 3:5] = real[2, 0] = real[2, 6] = 0
    return real


def packed_layers(model: nn.Module) -> list[bool]:
    """Of each layer of a model under `unpad` whether it has run packed."""
    found = (vars(module).get(UNPADDED) for module in model.modules())
    return [bool(own.probed) for own in found if own is not None]
