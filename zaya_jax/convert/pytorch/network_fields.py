"""Unknown fields of a config.json: an error if they may change the model, otherwise a note.

transformers ignores fields that a model's code does not know. If such a field changes the model, for example
by scaling its rotary positions, a converted model would silently compute something else.
"""

from collections.abc import Collection, Mapping
from typing import Any

from zaya_jax.config import HYBRID, HYBRID_SLIDING
from zaya_jax.convert.pytorch.huggingface import NATIVE_FIELDS, check_fixed, is_off
from zaya_jax.convert.pytorch.layouts import LayoutName
from zaya_jax.convert.pytorch.legacy import FIXED_FIELDS, LEGACY_FIELDS
from zaya_jax.errors import UserError

_BOOKKEEPING = frozenset((
    # Fields about the file and the code that loads it.
    "architectures", "attn_implementation", "auto_map", "custom_pipelines", "dtype", "finetuning_task",
    "id2label", "is_decoder", "is_encoder_decoder", "label2id", "model_type", "name_or_path", "prefix",
    "problem_type", "quantization_config", "task_specific_params", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers_version", "unsloth_fixed", "unsloth_version", "use_flash_attention",
    "use_flash_attention_2", "use_flash_attn",
    # Token ids, which companion_files.py reads, and those of other kinds of models.
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "unk_token_id",
    # Fields about execution and training, which do not change what is computed.
    "activation_func_fp8_input_store", "apply_rope_fusion", "ar_threshold", "bias_activation_fusion",
    "chunk_size", "chunk_size_feed_forward", "fused_add_norm", "init_from_megatron_checkpoint",
    "init_from_megatron_checkpoint_path", "load_balance_coeff", "mamba_cache_dtype", "mamba_chunk_size",
    "output_attentions", "output_hidden_states", "output_router_logits", "residual_in_fp32",
    "return_dict", "router_aux_loss_coef", "smoe_high_prec", "smoe_parallel_scan_thres", "use_bfloat16",
    "use_cache", "use_grouped_mm", "zaya_high_prec",
    # Sampling parameters, which older versions of transformers wrote to this file.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_p",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p",
))  # fmt: skip
"""Fields that do not change what the model computes."""
_NETWORK_BEGINNINGS = (
    "alibi", "attention", "attn", "activat", "bias", "cca", "causal", "clamp", "clip", "conv", "dropout",
    "embed", "epsilon", "expert", "factor", "ffn", "gate", "head", "hidden", "intermediate", "kv", "latent",
    "layer", "logit", "lora", "mask", "mlp", "moe", "multiplier", "norm", "position", "qk", "quant",
    "residual", "rmsnorm", "rope", "rotary", "router", "scal", "sink", "skip", "sliding", "smoe", "softcap",
    "swa", "temperature", "theta", "topk", "vocab", "window", "yarn", "zaya",
)  # fmt: skip
_NETWORK_WORDS = {"act", "att", "cap", "capping", "depth", "dim", "eda", "eps", "mod", "rank", "size", "temp",
                  "tie", "tied", "width"}  # fmt: skip
"""Words and prefixes of words in fields that change the model, collected from configs of many models."""
_OTHER_SPELLINGS = {"rope_theta", "rotary_base", "partial_rotary_factor", "rope_pct", "swa_rotary_base",
                    "rope_parameters"}  # fmt: skip
"""Fields of rotary positions that one layout ignores; scaled positions are detected before."""


def unread_fields(values: Mapping[str, Any], layout: LayoutName) -> tuple[str, ...]:
    """Unknown fields of a config.json that are set, as "name = value".

    Args:
      values: all fields of config.json.
      layout: layout of the folder.

    Raises:
      UserError: for an unknown field that may change the model, judging by its name.
    """
    # config_from_huggingface has validated the types of layers in use; other types do not matter.
    kinds = (HYBRID, HYBRID_SLIDING) if layout == "native" else ()
    for name, ignored in (("rope_scaling", ()), ("rope_parameters", kinds)):
        # Checked first, because scaled positions are the most common modification of released models.
        if not _is_unscaled(values.get(name), ignored=ignored):
            raise UserError(
                f"{name} is {_short(values[name])}; only unscaled rotary positions are supported, "
                'that is rope_type "default"'
            )
    check_fixed(values, FIXED_FIELDS | {"num_experts_per_tok": 1})
    # A field of the other layout is unknown here, and checked by its name.
    own = NATIVE_FIELDS if layout == "native" else LEGACY_FIELDS
    read = _BOOKKEEPING | FIXED_FIELDS.keys() | {"num_experts_per_tok", "rope_scaling"} | own
    # Fields with a leading underscore are internal to transformers, and disabled features have no effect.
    unread = {
        name: value
        for name, value in values.items()
        if name not in read and not name.startswith("_") and not is_off(name, value)
    }
    for name, value in unread.items():
        if _may_change_network(name):
            raise UserError(
                f"{name} is {_short(value)}; this field is not supported, and judging by its name it may "
                "change what the model computes; remove it only if the model was trained without it"
            )
    return tuple(f"{name} = {_short(value)}" for name, value in unread.items())


def _may_change_network(name: str) -> bool:
    # Words, not substrings: "rope" must not match "property".
    words = name.lower().split("_")
    is_about_network = any(word in _NETWORK_WORDS or word.startswith(_NETWORK_BEGINNINGS) for word in words)
    return is_about_network and name not in _OTHER_SPELLINGS


def _is_unscaled(value: Any, *, ignored: Collection[str] = ()) -> bool:
    """Whether a section does not scale rotary positions, for all types of layers."""
    if not isinstance(value, Mapping):
        return not value
    return all(
        _is_unscaled(each) if name in (HYBRID, HYBRID_SLIDING) else _leaves_positions(name, each)
        for name, each in value.items()
        if name not in ignored
    )


def _leaves_positions(name: str, value: Any) -> bool:
    if name in ("rope_type", "type"):
        return value in ("default", None)
    # Some code applies a factor even without a type.
    return name in ("rope_theta", "partial_rotary_factor") or is_off(name, value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
