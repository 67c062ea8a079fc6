# SPDX-License-Identifier: Apache-2.0
"""Action experts, and the checks of `action_expert/config.json` of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edgellm_ros.builder.config.rope import is_plain
from edgellm_ros.builder.model.decoder import RMSNorm
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.config import ActionConfig, ActionSpaceConfig, TrajectoryHistoryConfig
from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.engine_directory.schema import from_dict, read_json

EXPERT_MODEL_TYPE = "edgellm_flow_expert"


@dataclass(frozen=True)
class ExpertArchitecture:
    """What the layouts of action experts have in common."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    num_denoise_steps: int
    action_space: ActionSpaceConfig
    trajectory_history: TrajectoryHistoryConfig
    history_token_id: int
    future_start_token_id: int
    rtc_max_delay: int  # most first actions that it was trained to continue (real-time chunking); 0 = none
    kv_layers: tuple[int, ...]  # of the language model, from 0, whose KV caches the expert's layers read

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def takes_navigation(self) -> bool:
        """Tell whether prompts may have an instruction of navigation."""
        return False

    @property
    def norm(self) -> RMSNorm:
        """Return what the RMSNorms have in common."""
        return RMSNorm(self.rms_norm_eps)

    def kv_caches(self, llm: LanguageModelConfig) -> tuple[int, ...]:
        """Return which of the language model's KV caches each layer of the expert reads.

        Only attention layers have a KV cache.
        """
        return tuple(llm.attention_layers.index(layer) for layer in self.kv_layers)

    def config(self, llm: LanguageModelConfig) -> ActionConfig:
        """Return the configuration for the runtime."""
        return ActionConfig(
            num_hidden_layers=self.num_hidden_layers,
            kv_caches=self.kv_caches(llm),
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            num_denoise_steps=self.num_denoise_steps,
            future_start_token_id=self.future_start_token_id,
            history_token_id=self.history_token_id,
            action_space=self.action_space,
            trajectory_history=self.trajectory_history,
            rtc_max_delay=self.rtc_max_delay,
            takes_navigation=self.takes_navigation,
        )


@dataclass(frozen=True)
class PlainArchitecture(ExpertArchitecture):
    """The keys of `action_expert/config.json`: an action is one linear layer's input."""

    model_type: str = field(kw_only=True)
    time_embedding_dim: int = field(kw_only=True)
    time_min_period: float = field(kw_only=True)  # of the time features, in flow time (0 to 1)
    time_max_period: float = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_type != EXPERT_MODEL_TYPE:
            raise ValueError(f"model_type must be {EXPERT_MODEL_TYPE!r}, got {quoted(self.model_type)}")
        if self.time_embedding_dim < 2 or self.time_embedding_dim % 2:
            raise ValueError(f"time_embedding_dim must be even, got {self.time_embedding_dim}")
        if not 0 < self.time_min_period < self.time_max_period:
            raise ValueError(
                f"periods must be positive and rising, got time_min_period {self.time_min_period}, "
                f"time_max_period {self.time_max_period}"
            )


@dataclass(frozen=True)
class FourierArchitecture(ExpertArchitecture):
    """An expert whose actions and time become sines and cosines first, as Alpamayo's."""

    frequencies: tuple[float, ...] = field(kw_only=True)  # of the features, in turns
    encoder_size: int = field(kw_only=True)  # between the layers of the MLP behind the features
    encoder_layers: int = field(kw_only=True)  # of the MLP, without the first one
    navigation: bool = field(kw_only=True)

    @property
    def takes_navigation(self) -> bool:
        return self.navigation


@dataclass(frozen=True)
class Expert:
    """An action expert of a checkpoint."""

    architecture: ExpertArchitecture
    weights: Weights  # under the names of `build_expert`


def expert_architecture(path: Path, llm: LanguageModelConfig) -> PlainArchitecture:
    """Read `action_expert/config.json`.

    `kv_layers` may be missing: then the expert has a layer for each attention layer of the language model.
    So may `rtc_max_delay`: then the expert was not trained to continue a chunk of actions. Bins of histories
    are computed in fp64.
    ValueError for an unknown key, or a value that does not fit the model whose KV cache the expert reads.
    """
    data = read_json(path)
    data.pop("architectures", None)
    named = "kv_layers" in data
    defaults = {"kv_layers": llm.attention_layers, "rtc_max_delay": 0}
    if isinstance(history := data.get("trajectory_history"), dict):
        data["trajectory_history"] = {"single_precision": False, **history}
    expert = from_dict(PlainArchitecture, {**defaults, **data}, str(path))
    _check_kv_layers(path, expert, llm, named)
    check_expert(str(path), expert, llm)
    return expert


def check_expert(where: str, expert: ExpertArchitecture, llm: LanguageModelConfig) -> None:
    """Raise ValueError unless an expert fits its language model.

    where: the file of its configuration.
    """
    for name, found, needed in (
        ("rope_theta", expert.rope_theta, llm.rope.theta),
        ("num_key_value_heads", expert.num_key_value_heads, llm.num_key_value_heads),
        ("head_dim", expert.head_dim, llm.head_dim),
    ):
        if found != needed:
            raise ValueError(
                f"{where}: {name} {found}: the language model, whose KV cache the expert reads, has {needed}"
            )
    if not is_plain(llm.rope):
        raise ValueError(
            f"{where}: rope_theta {expert.rope_theta}: the action expert, which rotates its queries as the "
            "language model does, supports rope_type default only"
        )
    tokens = expert.trajectory_history
    last = max(
        expert.history_token_id, expert.future_start_token_id, tokens.first_token_id + tokens.num_tokens - 1
    )
    if last >= llm.vocab_size:
        raise ValueError(f"{where}: token id {last} is outside the vocabulary of {llm.vocab_size}")


def _check_kv_layers(path: Path, expert: ExpertArchitecture, llm: LanguageModelConfig, named: bool) -> None:
    """Raise ValueError unless each layer of the expert has a KV cache to read."""
    count, layers = expert.num_hidden_layers, expert.kv_layers
    if count != len(layers):
        kind = "attention layers" if llm.layer_types else "layers"
        has = (
            f"kv_layers has {len(layers)}"
            if named
            else (
                f"the language model, whose KV cache the expert reads, has {len(layers)} {kind}; "
                "kv_layers names those that it reads"
            )
        )
        raise ValueError(f"{path}: num_hidden_layers {count}: {has}")
    for place, layer in enumerate(layers):
        if not 0 <= layer < llm.num_hidden_layers:
            raise ValueError(
                f"{path}: kv_layers[{place}] {layer}: expected a layer from 0 to {llm.num_hidden_layers - 1}"
            )
        if layer not in llm.attention_layers:
            raise ValueError(
                f"{path}: kv_layers[{place}] {layer}: this layer of the language model is of type "
                f"{llm.layer_types[layer]} and has no KV cache; attention layers are "
                f"{', '.join(map(str, llm.attention_layers))}"
            )
