"""Families of models that are tested without a row of their own in `docs/transformers.md`."""

from __future__ import annotations

from typing import Final

#: Others whose attention has one of the forms of `hk.heads` (`FORMS` in heads/layouts.py): tested are outputs under
#: `use`, gates, closed and pruned heads, saving.
OF_A_FORM: Final[tuple[str, ...]] = (
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
ATTENTION_ALONE: Final[tuple[str, ...]] = (
    "bitnet", "blip_2_vision_model", "deepseek_v2", "diffllama", "esmc", "flex_olmo",
    "glm4_moe_lite", "gpt_bigcode", "gpt_neox", "instructblip_vision_model", "internvl_vision",
    "janus_vision_model", "minicpm3", "minimax_m2", "mistral4", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "persimmon", "phi3", "qianfan_ocr_vision", "sam3_vit_model", "wav2vec2-conformer",
)  # fmt: skip
