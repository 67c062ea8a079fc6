# SPDX-License-Identifier: Apache-2.0
"""`config.json` of an engine directory, written by the builder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from edgellm_ros.diffusion.config import ActionConfig, ActionHeadConfig
from edgellm_ros.diffusion.policy_config import PolicyConfig
from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.builder_config import BuilderConfig
from edgellm_ros.engine_directory.choices import PRECISIONS
from edgellm_ros.engine_directory.draft_config import EAGLE, DraftConfig
from edgellm_ros.engine_directory.files import FileEntry, check_files
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.engine_directory.recurrent_config import CHAIN_TOKENS
from edgellm_ros.engine_directory.schema import NULLABLE, from_dict, read_json, to_dict
from edgellm_ros.multimodal.audio.config import AudioConfig
from edgellm_ros.multimodal.video_config import AS_TEXT, VideoConfig
from edgellm_ros.multimodal.vision_config import QwenVisionTower, VisionConfig

FORMAT_VERSION = 24
CONFIG_FILE = "config.json"
# A prefill has at least two tokens: its result must not depend on padding, nor on the number of cached tokens
# (OnnxRuntimeBackend).
MIN_PREFILL = 2
VERIFICATION_TOKENS = 61  # of `llm/model.onnx`: a tree of 60 drafted tokens and the token before it


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids of special tokens; None if the checkpoint has no such token.

    The pad id fills rows of a batch.
    """

    pad_token_id: int
    image_token_id: int | None
    vision_start_token_id: int | None
    vision_end_token_id: int | None
    audio_token_id: int | None
    audio_start_token_id: int | None
    audio_end_token_id: int | None
    transcript_token_id: int | None = None  # before the words of a sound; only of models for speech to text


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of the checkpoint (generation_config.json)."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or self.repetition_penalty <= 0:
            raise ValueError(
                "temperature and top_k must not be negative, top_p in (0, 1], repetition_penalty > 0, got "
                f"{self.temperature}, {self.top_k}, {self.top_p}, {self.repetition_penalty}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """All contents of `config.json`."""

    format_version: int
    model_type: str
    precision: str
    # of the language model or a policy's prefix; None for a policy without one, of which nothing reads it
    llm: LanguageModelConfig = field(metadata={NULLABLE: True})
    builder: BuilderConfig
    vision: VisionConfig | None  # None if the checkpoint has no such part; also below
    audio: AudioConfig | None
    action: ActionHeadConfig | None
    draft: DraftConfig | None  # the draft head of speculative decoding
    special_tokens: SpecialTokens
    stop_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    files: tuple[FileEntry, ...]

    # The same values under the names of TensorRT Edge-LLM's LLMEngineRunnerConfig.
    rope_config = property(lambda self: self.llm.rope)
    num_decoder_layers = property(lambda self: self.llm.num_hidden_layers)
    num_attention_layers = property(lambda self: self.llm.num_attention_layers)  # layers with a KV cache
    num_mamba_layers = property(lambda self: self.llm.num_recurrent_layers)  # of any recurrent kind
    mamba_num_heads = property(lambda self: _recurrent_size(self, "num_heads"))
    mamba_head_dim = property(lambda self: _recurrent_size(self, "value_dim"))
    ssm_state_size = property(lambda self: _recurrent_size(self, "key_dim"))
    conv_dim = property(lambda self: _recurrent_size(self, "conv_dim"))
    conv_kernel = property(lambda self: _recurrent_size(self, "conv_kernel"))
    num_kv_heads = property(lambda self: self.llm.num_key_value_heads)
    head_dim = property(lambda self: self.llm.head_dim)
    rotary_dim = property(lambda self: self.llm.rope.rotary_dim)
    hidden_size = property(lambda self: self.llm.hidden_size)
    vocab_size = property(lambda self: self.llm.vocab_size)
    reduced_vocab_size = property(lambda self: self.llm.reduced_vocab_size)
    output_vocab_size = property(lambda self: self.llm.output_vocab_size)
    num_deepstack_features = property(lambda self: self.llm.num_deepstack_features)
    max_supported_batch_size = property(lambda self: self.builder.max_batch_size)
    max_supported_input_length = property(lambda self: self.builder.max_input_len)
    max_kv_cache_capacity = property(lambda self: self.builder.max_kv_cache_capacity)
    max_supported_lora_rank = property(lambda self: self.builder.max_lora_rank)
    hidden_state_layers = property(lambda self: self.builder.hidden_state_layers)
    kv_cache_type = property(lambda self: self.builder.kv_cache or self.precision)
    video = property(lambda self: _video(self))
    image_token_id = property(lambda self: self.special_tokens.image_token_id)
    audio_token_id = property(lambda self: self.special_tokens.audio_token_id)
    video_token_id = property(lambda self: None if self.video is None else self.video.token_id)
    use_context_dependent_rope = property(lambda self: bool(self.llm.rope.mrope_section))
    enable_eagle_spec_decode = property(lambda self: self.draft is not None and self.draft.kind == EAGLE)

    @property
    def max_verify_tree_size(self) -> int:
        """Maximum number of tokens that the language model verifies in one run.

        The number includes the newest token, the root of a tree of drafted tokens.
        """
        most = min(VERIFICATION_TOKENS, self.builder.max_kv_cache_capacity)
        if self.draft is not None:
            most = self.draft.max_verify_tree_size
        return most if self.llm.recurrent is None else min(most, CHAIN_TOKENS)

    @property
    def expert(self) -> ActionConfig | None:
        """Return the action head beside a language model that answers; None without one."""
        return self.action if isinstance(self.action, ActionConfig) else None

    @property
    def policy(self) -> PolicyConfig | None:
        """Return the policy; None if the engine answers with text.

        A policy answers with actions only.
        """
        return self.action if isinstance(self.action, PolicyConfig) else None

    @property
    def has_language_model(self) -> bool:
        """Tell whether any graph has the layers of a language model."""
        return self.llm is not None

    @property
    def transcribes(self) -> bool:
        """Tell whether the engine is for speech to text: prompts have no text of the user."""
        return self.special_tokens.transcript_token_id is not None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if not self.stop_token_ids and self.policy is None:
            raise ValueError("stop_token_ids must not be empty")
        self._check_parts_fit()

    def _check_parts_fit(self) -> None:
        if not self.has_language_model:
            if self.policy is None:
                raise ValueError("llm must not be null: only a policy may have no language model")
            self._check_policy()
            return
        llm, vision, audio, action = self.llm, self.vision, self.audio, self.expert
        if max(self.builder.hidden_state_layers, default=0) > llm.num_hidden_layers:
            raise ValueError(
                f"hidden_state_layers {list(self.builder.hidden_state_layers)}: "
                f"the language model has {llm.num_hidden_layers} layers"
            )
        if vision is not None:
            if vision.out_hidden_size != llm.hidden_size:
                raise ValueError(
                    f"vision out_hidden_size {vision.out_hidden_size} is not hidden_size {llm.hidden_size}"
                )
            if vision.num_deepstack_features != llm.num_deepstack_features:
                raise ValueError(
                    f"vision has {vision.num_deepstack_features} deepstack features, "
                    f"llm takes num_deepstack_features {llm.num_deepstack_features}"
                )
            if vision.adds_image_boundaries and self.special_tokens.vision_end_token_id is None:
                raise ValueError(f"special_tokens needs vision_end_token_id for a tower of {vision.kind}")
            if vision.min_image_tokens > self.builder.max_input_len:
                raise ValueError(
                    f"max_input_len {self.builder.max_input_len} is less than the {vision.min_image_tokens} "
                    "tokens of the smallest image"
                )
            if (
                self.special_tokens.image_token_id is None
                or self.special_tokens.vision_start_token_id is None
            ):
                raise ValueError(
                    "special_tokens needs image_token_id and vision_start_token_id for a vision tower"
                )
        self._check_video()
        if audio is not None:
            if audio.output_dim != llm.hidden_size:
                raise ValueError(f"audio output_dim {audio.output_dim} is not hidden_size {llm.hidden_size}")
            if self.special_tokens.audio_token_id is None:
                raise ValueError("special_tokens needs audio_token_id for an audio encoder")
        elif self.transcribes:
            raise ValueError("special_tokens has transcript_token_id, which needs an audio encoder")
        if action is not None:
            for name, expected in (
                ("num_key_value_heads", llm.num_key_value_heads),
                ("head_dim", llm.head_dim),
            ):
                if getattr(action, name) != expected:
                    raise ValueError(
                        f"action {name} {getattr(action, name)} is not llm {name} {expected}: "
                        "the action head cannot read the KV cache"
                    )
            if max(action.kv_caches) >= llm.num_attention_layers:
                raise ValueError(
                    f"action kv_caches {list(action.kv_caches)}: the language model has "
                    f"{llm.num_attention_layers} KV caches"
                )
            if action.future_start_token_id not in self.stop_token_ids:
                raise ValueError(
                    f"stop_token_ids must have future_start_token_id {action.future_start_token_id}"
                )
        self._check_draft()
        self._check_policy()

    def _check_policy(self) -> None:
        policy = self.policy
        if policy is None:
            return
        others = ("vision", "audio", "draft")
        present = [name for name in others if getattr(self, name) is not None]
        if present:
            raise ValueError(f"{present[0]} must be null: action {policy.kind} is a policy")
        if policy.max_prefix_rows > self.builder.max_input_len:
            raise ValueError(
                f"max_input_len {self.builder.max_input_len} is less than the {policy.max_prefix_rows} rows "
                "of the policy's prefix"
            )

    def _check_draft(self) -> None:
        llm, draft, capacity = self.llm, self.draft, self.builder.max_kv_cache_capacity
        if draft is None:
            return
        if max(draft.base_state_layers, default=0) > llm.num_hidden_layers:
            raise ValueError(
                f"draft base_state_layers {list(draft.base_state_layers)}: the language model has "
                f"{llm.num_hidden_layers} layers"
            )
        if draft.mask_token_id >= llm.vocab_size:
            raise ValueError(
                f"draft mask_token_id {draft.mask_token_id} is not below llm vocab_size {llm.vocab_size}"
            )
        if draft.vocab_size > llm.vocab_size:
            raise ValueError(
                f"draft vocab_size {draft.vocab_size} is more than llm vocab_size {llm.vocab_size}"
            )
        if draft.shares_embedding and draft.hidden_size != llm.hidden_size:
            raise ValueError(
                f"draft hidden_size {draft.hidden_size} is not llm hidden_size {llm.hidden_size}: "
                "it cannot share the embedding table"
            )
        if draft.max_verify_tree_size >= capacity:
            raise ValueError(
                f"max_verify_tree_size {draft.max_verify_tree_size} must be less than "
                f"max_kv_cache_capacity {capacity}"
            )

    def _check_video(self) -> None:
        video = _video(self)
        if video is None:
            return
        if not 0 <= video.token_id < self.llm.vocab_size:
            raise ValueError(f"video token_id {video.token_id} is outside of 0..{self.llm.vocab_size - 1}")
        if video.token_id == self.special_tokens.image_token_id:
            raise ValueError(f"video token_id {video.token_id} is image_token_id too")
        if video.timestamps == AS_TEXT and self.special_tokens.vision_end_token_id is None:
            raise ValueError("special_tokens needs vision_end_token_id for videos with timestamps as text")
        tokens = self.special_tokens
        if video.sound_chunk and (
            self.audio is None or None in (tokens.audio_start_token_id, tokens.audio_end_token_id)
        ):
            raise ValueError(
                f"video sound_chunk {video.sound_chunk} needs an audio encoder, and special_tokens "
                "audio_start_token_id and audio_end_token_id"
            )

    @property
    def min_action_samples(self) -> int:
        """Number of trajectories that every answer has: 1 for a policy, else 0."""
        return 0 if self.policy is None else 1

    def check_answers_with_text(self, what: str) -> None:
        """Raise ValueError for a policy, which writes no text.

        what: what needs text, such as "a chat".
        """
        if self.policy is not None:
            raise ValueError(
                f"{what} needs an engine that answers with text; this one is a policy ({self.policy.kind}): "
                "see docs/policies.md"
            )

    def save(self, engine_dir: str | Path) -> Path:
        """Write `config.json` into the directory and return its path."""
        path = Path(engine_dir) / CONFIG_FILE
        path.write_text(json.dumps(to_dict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, engine_dir: str | Path, verify: bool = False) -> EngineConfig:
        """Read and check `config.json`, and check that the files it lists are complete.

        `verify` compares their SHA-256 too. FileNotFoundError for a missing directory or file, ValueError for
        a wrong config or a file of the wrong size or content.
        """
        path = Path(engine_dir) / CONFIG_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} not found: {engine_dir} is not an engine directory (made by `edgellm export`)"
            )
        data = read_json(path)
        version = data.get("format_version")
        if version != FORMAT_VERSION:  # other versions have other keys
            raise ValueError(
                f"{path}: format_version is {quoted(version)}, expected {FORMAT_VERSION}: export again"
            )
        config = from_dict(cls, data, str(path))
        check_files(engine_dir, config.files, verify)
        return config


def _video(config: EngineConfig) -> VideoConfig | None:
    """Return the video processor's configuration; None if the engine takes no videos."""
    return config.vision.video if isinstance(config.vision, QwenVisionTower) else None


def _recurrent_size(config: EngineConfig, name: str) -> int:
    """Return a size of the recurrent layers; 0 if there are none."""
    return 0 if config.llm.recurrent is None else getattr(config.llm.recurrent, name)
