# SPDX-License-Identifier: Apache-2.0
"""Reads the rotary position embedding of a checkpoint, as frequencies.

Reference: transformers 5.23, modeling_rope_utils.py (ROPE_INIT_FUNCTIONS and standardize_rope_params).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.engine_directory.rope_config import RopeConfig

LARGEST_THETA = float(np.finfo(np.float32).max)
ORIGINAL = "original_max_position_embeddings"


def read_rope(
    text: ConfigSection, head_dim: int, default_theta: float = 10000.0, partial_heads: bool = False
) -> RopeConfig:
    """Read RoPE of a text section, without mRoPE.

    The values are in `rope_parameters` (transformers 5) or in `rope_scaling` and the section itself (before).
    default_theta: the model code's, for checkpoints without `rope_theta`. partial_heads: whether the model
    code rotates only a part of each head if `partial_rotary_factor` says so. ValueError for a type that is
    not supported, and for RoPE that differs between layers.
    """
    rope = rope_section(text)
    kind = _rope_type(rope)
    holder = rope if rope.has("rope_theta") else text
    theta = holder.number("rope_theta", default_theta)
    if theta <= 1:
        raise holder.fail("rope_theta", "expected more than 1")
    if theta > LARGEST_THETA:
        raise holder.fail("rope_theta", f"expected at most {LARGEST_THETA:.3g}")
    holder = rope if rope.has("partial_rotary_factor") else text
    share = holder.number("partial_rotary_factor", 1.0)
    if not 0 < share <= 1:
        raise holder.fail("partial_rotary_factor", "expected more than 0 and at most 1")
    if share < 1 and not partial_heads:
        raise holder.fail("partial_rotary_factor", "this model type rotates whole heads, supported: 1")
    if kind == "proportional":
        frequencies, scaling = _proportional(rope, theta, head_dim, share), 1.0
    else:
        frequencies, scaling = KINDS[kind](rope, text, theta, int(head_dim * share))
    return rope.make(
        RopeConfig,
        theta=theta,
        frequencies=tuple(frequencies.astype(np.float32).tolist()),
        attention_scaling=scaling,
        mrope_section=(),
        mrope_interleaved=False,
    )


def rope_section(text: ConfigSection) -> ConfigSection:
    """Find the values of RoPE: `rope_scaling` takes precedence, as in transformers 5."""
    key = "rope_scaling" if text.data.get("rope_scaling") else "rope_parameters"
    rope = text.section(key) if text.has(key) else ConfigSection({}, text.where)
    for name, value in rope.data.items():
        if isinstance(value, Mapping):
            raise rope.fail(name, "RoPE that differs between layers is not supported")
    if rope.data.get("mrope_section") == []:  # the runtime's code for positions without axes
        raise rope.fail("mrope_section", "expected numbers of frequencies for time, height and width")
    return rope


def require_theta(text: ConfigSection) -> None:
    """Raise ValueError unless a text section has `rope_theta`, in one of its places."""
    holders = [text.section(key) for key in ("rope_parameters", "rope_scaling") if text.has(key)]
    if not any(each.has("rope_theta") for each in (text, *holders)):
        raise ValueError(f"{text.where}: key 'rope_theta' is missing")


def read_position_limit(text: ConfigSection) -> tuple[int, str]:
    """Return the context length and the config key it comes from.

    Longrope has other frequencies for sequences beyond its first limit, which may not change within one
    sequence: keys in the cache have been rotated already.
    """
    key, limit = "max_position_embeddings", text.size("max_position_embeddings")
    rope = rope_section(text)
    if _rope_type(rope) == "longrope":
        return min(limit, _original(rope, text)), f"{ORIGINAL}, up to which rope_type longrope is supported,"
    return limit, key


def plain_frequencies(theta: float, rotary_dim: int) -> np.ndarray:
    """Compute the frequencies of rope_type default: [rotary_dim / 2] float32.

    Frequencies are in radians per position.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def is_plain(rope: RopeConfig) -> bool:
    """Tell whether a head, or its first part, has rope_type default's frequencies."""
    plain = tuple(plain_frequencies(rope.theta, rope.rotary_dim).tolist())
    return rope.frequencies == plain and rope.attention_scaling == 1


def _rope_type(rope: ConfigSection) -> str:
    key = "rope_type" if rope.has("rope_type") else "type"
    if rope.data.get(key) == "mrope":  # an older name; the section says it
        return "default"
    return rope.one_of(key, [*KINDS, "proportional"], default="default")


def _original(rope: ConfigSection, text: ConfigSection) -> int:
    """Read the positions of the first training."""
    if text.has(ORIGINAL):
        return text.size(ORIGINAL)
    return rope.size(ORIGINAL, text.size("max_position_embeddings"))


def _scale(rope: ConfigSection, text: ConfigSection) -> float:
    """Read the length of the model's sequences relative to its first training's."""
    if rope.has("factor"):
        return _positive(rope, "factor")
    return text.size("max_position_embeddings") / _original(rope, text)


def _positive(rope: ConfigSection, key: str, default: float | None = None) -> float:
    value = rope.number(key, default)
    if value <= 0:
        raise rope.fail(key, "expected more than 0")
    return value


Frequencies = tuple[np.ndarray, float]  # frequencies, attention scaling


def _default(rope: ConfigSection, text: ConfigSection, theta: float, dim: int) -> Frequencies:
    return plain_frequencies(theta, dim), 1.0


def _linear(rope: ConfigSection, text: ConfigSection, theta: float, dim: int) -> Frequencies:
    return plain_frequencies(theta, dim) / np.float32(_positive(rope, "factor")), 1.0


def _proportional(rope: ConfigSection, theta: float, head_dim: int, share: float) -> np.ndarray:
    """Compute frequencies for whole heads, of which the last pairs are not rotated."""
    frequencies = plain_frequencies(theta, head_dim)
    frequencies[int(share * head_dim // 2) :] = 0
    return frequencies / np.float32(_positive(rope, "factor", 1.0))


def _llama3(rope: ConfigSection, text: ConfigSection, theta: float, dim: int) -> Frequencies:
    """Compute frequencies: long waves stretched, short ones kept, others in between."""
    factor, original = _positive(rope, "factor"), _original(rope, text)
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if high <= low:
        raise rope.fail("high_freq_factor", f"expected more than low_freq_factor {low}")
    plain = plain_frequencies(theta, dim)
    waves = np.float32(2 * math.pi) / plain
    kept = (np.float32(original) / waves - np.float32(low)) / np.float32(high - low)
    mixed = (1 - kept) * plain / np.float32(factor) + kept * plain
    stretched = np.where(waves > original / low, plain / np.float32(factor), mixed)
    return np.where(waves < original / high, plain, stretched), 1.0


def _yarn(rope: ConfigSection, text: ConfigSection, theta: float, dim: int) -> Frequencies:
    """Compute the frequencies of rope_type yarn: [rotary_dim / 2] float32.

    The fewer turns a pair makes within the context of the first training, the more it is stretched.
    """
    scale, original = _scale(rope, text), _original(rope, text)

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(rope.number("beta_fast", 32) or 32), pair(rope.number("beta_slow", 1) or 1)
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    powers = np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    pairs = np.arange(len(powers), dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = 1 - ramp
    frequencies = 1 / (np.float32(scale) * powers) * (1 - kept) + 1 / powers * kept
    if rope.has("attention_factor"):
        return frequencies, rope.number("attention_factor")
    first, second = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    if first and second:
        return frequencies, _yarn_scaling(scale, first) / _yarn_scaling(scale, second)
    return frequencies, _yarn_scaling(scale, 1)


def _yarn_scaling(scale: float, weight: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def _longrope(rope: ConfigSection, text: ConfigSection, theta: float, dim: int) -> Frequencies:
    """Compute frequencies of sequences within the limit, see `read_position_limit`."""
    scale, factors = _scale(rope, text), rope.numbers("short_factor")
    powers = np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    if len(factors) != len(powers) or min(factors) <= 0:
        raise rope.fail("short_factor", f"expected {len(powers)} numbers above 0")
    frequencies = 1 / (np.array(factors, np.float32) * powers)
    if rope.has("attention_factor"):
        return frequencies, rope.number("attention_factor")
    if scale <= 1:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(scale) / math.log(_original(rope, text)))


KINDS: dict[str, Callable[[ConfigSection, ConfigSection, float, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
