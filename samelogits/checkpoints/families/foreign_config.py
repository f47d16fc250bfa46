"""Reading a foreign config.json so that no key is dropped in silence, and writing one back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from samelogits.config import LAYER_LIMIT, DecoderConfig, field_types
from samelogits.errors import CheckpointError, ConfigError, shown
from samelogits.parameters import raise_faults

# gelu_new, gelu_pytorch_tanh and gelu_fast are three spellings of the tanh approximation; plain gelu is the erf form.
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu_squared",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

# Keys that say how a model is kept, run, sampled or trained, not which function it is.
HARMLESS = frozenset({
    "_attn_implementation", "attn_implementation", "max_sequence_length", "unsloth_fixed", "unsloth_version",
    # What transformers 2 to 4 wrote into every file.
    "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_decoder_ids", "forced_eos_token_id",
    "gradient_checkpointing", "is_decoder", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_past", "output_scores", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "top_k", "top_p", "torchscript", "typical_p", "use_bfloat16",
    "_attn_implementation_autoset", "_from_model_config", "_name_or_path", "architectures", "auto_map", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "dtype", "eos_token_id", "finetuning_task", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "model_type", "num_labels", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip
# Keys that any file may have at these values.
FIXED: Mapping[str, Any] = MappingProxyType({"add_cross_attention": False, "pruned_heads": {}})


@dataclass(frozen=True)
class Field:
    """A config key that is one DecoderConfig field, or with several of these as many. default: what its absence means;
    None where it must be there."""

    key: str
    name: str
    default: Any = None


class ForeignConfig:
    """The keys of a config.json, each to be taken once; null equals absent. where: the file that messages name."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._left = {key: value for key, value in values.items() if value is not None}
        self._null = values.keys() - self._left.keys()
        self.where = where

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of `key`, an absent one being the default; CheckpointError if it isn't of this kind."""
        value = self._left.pop(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind and value is not default:
            raise self.fault(key, f"a value of type {kind.__name__}", value)
        return value

    def take_or_none(self, key: str, kind: type, default: Any) -> Any:
        """As take, for a key whose null is no absence but says that there is none."""
        return self.take(key, kind, None if key in self._null else default)

    def require(self, key: str, kind: type) -> Any:
        """As take, but an absent key raises CheckpointError."""
        if key not in self._left:
            raise self.fault(key, f"a value of type {kind.__name__}", None)
        return self.take(key, kind)

    def fault(self, key: str, expected: str, found: object) -> CheckpointError:
        """The error that says so, to be raised."""
        return CheckpointError(
            f"{self.where}: {key}: expected {expected}, found {'nothing' if found is None else shown(found)}"
        )

    def finish(self, fixed: Mapping[str, Any], harmless: Collection[str]) -> None:
        """Raise one CheckpointError naming every key left that is neither at its one supported value nor harmless."""
        faults = []
        for key, value in self._left.items():
            if key in fixed:
                if value != fixed[key] or (type(value) is bool) != (type(fixed[key]) is bool):  # 1.0 is 1, true isn't
                    faults.append(f"{key}: expected {fixed[key]!r}, the only value supported, found {shown(value)}")
            elif key not in harmless:
                faults.append(f"{shown(key)}: not understood, found {shown(value)}")
        raise_faults(faults, self.where)

    def build(self, values: Mapping[str, Any], fields: tuple[Field, ...]) -> DecoderConfig:
        """The config of these values; what it refuses is said with the name of the key."""
        try:
            return DecoderConfig(**values)
        except ConfigError as error:
            name, _, reason = str(error).partition(":")
            keys = {field.name: field.key for field in fields}
            raise CheckpointError(f"{self.where}: {keys.get(name, name)}:{reason}") from error


def one_rate(residual: float, embedding: float) -> float:
    """The rate of dropout, if both places have the same: this decoder has one for both, and else none in training."""
    return residual if residual == embedding else 0.0


def decode_fields(fields: tuple[Field, ...], keys: ForeignConfig) -> dict[str, Any]:
    """DecoderConfig fields, out of the keys."""
    hints = field_types(DecoderConfig)
    values, taken = {}, {}
    for field in fields:
        kind = str if field.name == "activation" else _kind(hints[field.name])
        if field.key not in taken:
            required = field.default is None
            taken[field.key] = keys.require(field.key, kind) if required else keys.take(field.key, kind, field.default)
        value = taken[field.key]
        if field.name == "n_layers" and value > LAYER_LIMIT:  # before a family lists them
            raise keys.fault(field.key, f"1 to {LAYER_LIMIT}", value)
        if field.name == "activation":
            if value not in ACTIVATIONS:
                raise keys.fault(field.key, f"one of {', '.join(ACTIVATIONS)}", value)
            value = ACTIVATIONS[value]
        values[field.name] = value
    return values


def encode_fields(fields: tuple[Field, ...], config: DecoderConfig) -> dict[str, Any]:
    """The inverse of decode_fields; an activation with several spellings gets the field's own or the first of them."""
    spelling = {name: key for key, name in reversed(ACTIVATIONS.items())}
    spelling |= {
        ACTIVATIONS[field.default]: field.default for field in fields if field.name == "activation" and field.default
    }
    values = {field.key: getattr(config, field.name) for field in fields}
    return {key: spelling[value] if isinstance(value, str) else value for key, value in values.items()}


def _kind(hint: Any) -> Any:
    """The type of a field, None aside."""
    return next((choice for choice in get_args(hint) if choice is not type(None)), hint)
