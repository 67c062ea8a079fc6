# SPDX-License-Identifier: Apache-2.0
"""The optimization profiles of each graph of an engine directory."""

from __future__ import annotations

from edgellm_ros.diffusion.diffusion_policy_config import DiffusionConfig
from edgellm_ros.diffusion.groot_config import GrootConfig
from edgellm_ros.diffusion.policy_config import FlowPolicyConfig, PolicyConfig
from edgellm_ros.engine.optimization_profile import Profile, Range
from edgellm_ros.engine_directory.adapters.lora_inputs import rank_sizes
from edgellm_ros.engine_directory.config import MIN_PREFILL, VERIFICATION_TOKENS, EngineConfig
from edgellm_ros.engine_directory.draft_config import DFLASH
from edgellm_ros.engine_directory.files import CONTEXT, DRAFT, VERIFY
from edgellm_ros.engine_directory.recurrent_config import CHAIN_TOKENS
from edgellm_ros.multimodal.vision_config import Qwen2_5VisionConfig


def one(size: int) -> Range:
    """Make a range of one size."""
    return Range(size, size, size)


def up_to(high: int, low: int = 1) -> Range:
    """Make a range from `low` to `high`, tuned for `high`."""
    return Range(low, high, high)


def make_profiles(config: EngineConfig, verification_tokens: int | None = None) -> dict[str, list[Profile]]:
    """Make the profiles of each graph of an engine directory.

    Profiles are in the order in which the runtime numbers them. The language model has three: prefill, decode
    (tuned for one sequence), verification of up to `verification_tokens` drafted tokens; `llm/verify` has
    those, with the engine's own limit of verified tokens, with recurrent layers at most CHAIN_TOKENS. A draft
    head has two: prefill, and levels of a tree, which also serve accepted tokens. A block drafter has one,
    and its context two: prefill and accepted tokens. A policy's graphs have one profile each.

    verification_tokens: None for VERIFICATION_TOKENS, or the size of the KV cache if that is smaller.
    ValueError if they exceed the KV cache.
    """
    builder = config.builder
    if config.policy is not None:
        return _policy_profiles(config.policy, builder.max_action_samples)
    if verification_tokens is None:
        verification_tokens = min(VERIFICATION_TOKENS, builder.max_kv_cache_capacity)
    if not 1 <= verification_tokens <= builder.max_kv_cache_capacity:
        raise ValueError(
            f"verification of {verification_tokens} tokens: expected 1 to the KV cache's "
            f"{builder.max_kv_cache_capacity}"
        )
    batch = Range(1, 1, builder.max_batch_size)
    lowest, largest = rank_sizes(1), rank_sizes(builder.max_lora_rank)
    rank = {name: up_to(largest[name], low) for name, low in lowest.items() if builder.max_lora_rank}
    tree, draft = up_to(verification_tokens), config.draft
    prefill = {"B": batch, "S": up_to(builder.max_input_len, MIN_PREFILL), "N": one(1), **rank}
    profiles = {
        "llm": [
            Profile("prefill", prefill, lengths_vary=True),
            Profile("decode", {"B": batch, "S": one(1), "N": one(1), **rank}),
            Profile("verification", {"B": batch, "S": tree, "N": tree, **rank}),
        ]
    }
    most = draft.max_verify_tree_size if draft is not None else builder.max_kv_cache_capacity
    if config.llm.recurrent is not None:
        most = min(most, CHAIN_TOKENS)
    if draft is not None or config.llm.recurrent is not None:
        verified = up_to(most)
        profiles[VERIFY] = [
            *profiles["llm"][:2],
            Profile("verification", {"B": batch, "S": verified, "N": verified, **rank}),
        ]
    if draft is not None and draft.kind == DFLASH:
        rows = up_to(builder.max_input_len, MIN_PREFILL)
        accepted_rows = max(draft.max_verify_tree_size, draft.max_draft_tree_size)
        profiles[CONTEXT] = [
            Profile("prefill", {"B": batch, "S": rows}, lengths_vary=True),
            Profile("accepted tokens", {"B": batch, "S": up_to(accepted_rows)}),
        ]
        block, drafted = one(draft.block_size), up_to(draft.block_size - 1)
        profiles[DRAFT] = [Profile("block", {"B": batch, "S": block, "N": drafted})]
    elif draft is not None:
        drafted = up_to(draft.max_draft_tree_size)
        # A run is that of a prompt or of accepted tokens, with one row of logits, or that of a level.
        accepted = {"B": batch, "S": up_to(builder.max_input_len, MIN_PREFILL), "N": one(1)}
        profiles[DRAFT] = [
            Profile("prefill", accepted, lengths_vary=True),
            Profile("levels", {"B": batch, "S": drafted, "N": drafted}),
        ]
    if config.vision is not None:
        vision = config.vision
        low, high = (
            vision.pixels_shape(tokens)[0] for tokens in (vision.min_image_tokens, builder.max_input_len)
        )
        images = {vision.pixels_dim: up_to(high, low)}
        if isinstance(vision, Qwen2_5VisionConfig) and vision.has_windows:
            images["W"] = windows(vision, builder.max_input_len)
        profiles["visual"] = [Profile("images", images, lengths_vary=True)]
    if config.audio is not None:
        chunks = -(-builder.max_input_len // config.audio.chunk_tokens)
        frames, tokens = config.audio.chunk_frames, builder.max_input_len
        sounds = {"N": Range(1, 1, chunks), "T": up_to(frames), "A": up_to(tokens)}
        profiles["audio"] = [Profile("sounds", sounds, lengths_vary=True)]
    if config.action is not None:  # one request at a time, with all its samples (ActionRunner)
        samples, rows = Range(1, 1, builder.max_action_samples), up_to(builder.max_kv_cache_capacity)
        profiles["action"] = [Profile("trajectories", {"n": samples, "P": rows})]
    return profiles


def _policy_profiles(policy: PolicyConfig, max_samples: int) -> dict[str, list[Profile]]:
    """Make the profiles of a policy's graphs."""
    samples = Range(1, 1, max_samples)
    if isinstance(policy, DiffusionConfig):
        return {
            "prefix": [Profile("observations", {})],
            "action": [Profile("actions", {"n": samples})],
        }
    if not isinstance(policy, FlowPolicyConfig):  # one graph, whose sizes are fixed
        return {"action": [Profile("actions", {})]}
    cameras, tokens = len(policy.cameras.names), policy.cameras.tokens
    if isinstance(policy, GrootConfig):
        low, high = (policy.vision.pixels_shape(rows)[0] for rows in (1, tokens))
        images, text = up_to(policy.images * tokens, policy.images), up_to(policy.max_prompt_tokens)
        rows = up_to(policy.max_prefix_rows, policy.images + 1)
        return {
            "visual": [Profile("images", {policy.vision.pixels_dim: up_to(high, low)}, lengths_vary=True)],
            "prefix": [Profile("prefix", {"I": images, "L": text, "S": rows}, lengths_vary=True)],
            "action": [Profile("actions", {"n": samples, "I": images, "L": text})],
        }
    return {
        "visual": [Profile("images", {"N": up_to(cameras)})],
        "prefix": [
            Profile(
                "prefix", {"I": up_to(cameras * tokens, tokens), "L": up_to(policy.max_prompt_tokens)},
                lengths_vary=True,
            )
        ],
        "action": [Profile("actions", {"n": samples, "S": up_to(policy.max_prefix_rows, tokens)})],
    }  # fmt: skip


def windows(vision: Qwen2_5VisionConfig, tokens: int) -> Range:
    """Make the range of window counts for images of up to `tokens` tokens.

    The range is tuned for a large image; an image of one row of tokens has the most windows.
    """
    return Range(1, -(-tokens // vision.window_tokens**2), -(-tokens // vision.window_tokens))


def input_shapes(
    name: str, shape: tuple[int | str, ...], profile: Profile
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Compute the smallest, tuned and largest shape of an input.

    ValueError for a symbol without a range.
    """
    missing = [dim for dim in shape if isinstance(dim, str) and dim not in profile.ranges]
    if missing:
        raise ValueError(
            f"input {name}: no range for dimension {missing[0]!r}, only for {', '.join(profile.ranges)}"
        )
    ranges = [one(dim) if isinstance(dim, int) else profile.ranges[dim] for dim in shape]
    return (
        tuple(size.low for size in ranges),
        tuple(size.tuned for size in ranges),
        tuple(size.high for size in ranges),
    )
