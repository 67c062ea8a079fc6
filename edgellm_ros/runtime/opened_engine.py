# SPDX-License-Identifier: Apache-2.0
"""OpenedEngine: an engine directory in use, until it is closed.

Adapters, LM heads and stored prefixes change while the runtime is open; engines do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from edgellm_ros.echo import quoted
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.draft_config import HEAD_KINDS
from edgellm_ros.runtime.answerer import Answerer
from edgellm_ros.runtime.metrics import RuntimeMetrics, StageClock
from edgellm_ros.runtime.opening import RuntimeOptions, begin_opening
from edgellm_ros.runtime.pipeline import Pipeline
from edgellm_ros.runtime.policy.pipeline import PolicyPipeline, no_language_model
from edgellm_ros.runtime.prefix.prefix_file import engine_fingerprint, load_prefix_cache, save_prefix_cache
from edgellm_ros.runtime.scheduling.scheduler import Scheduler
from edgellm_ros.runtime.scheduling.turn_lock import TurnLock
from edgellm_ros.runtime.stages.recovery import recover_after
from edgellm_ros.runtime.text.tokenizer import Tokenizer

Self = TypeVar("Self", bound="OpenedEngine")


class OpenedEngine:
    """The loaded parts of an engine directory, until `close`.

    Changes of adapters and LM heads apply to the next batch; the running batch keeps its own.
    """

    def __init__(self, engine_dir: Path, options: RuntimeOptions) -> None:
        opening = begin_opening(engine_dir, options)
        self.config, self.parts = opening.config, opening.parts
        self._metrics = RuntimeMetrics()
        self._lock = TurnLock()
        self._scheduler = Scheduler(self._lock, lambda: self._answerer, self._metrics)
        policy = self.config.policy
        self._opened: Pipeline | PolicyPipeline | None = (
            Pipeline(opening, self._metrics)
            if policy is None
            else PolicyPipeline(opening, policy, self._metrics)
        )

    @property
    def _answerer(self) -> Answerer:
        """What answers requests. EngineError if the runtime is closed."""
        opened = self._opened  # read once: another thread may close the runtime
        if opened is None:
            raise EngineError("the runtime is closed")
        return opened

    @property
    def pipeline(self) -> Pipeline:
        """The stages with their engines and buffers; not a stable interface.

        For tests and benchmarks. EngineError if the runtime is closed, or the engine is a policy.
        """
        answerer = self._answerer
        if not isinstance(answerer, Pipeline):
            raise EngineError(no_language_model(self.config))
        return answerer

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer, which any thread may use.

        EngineError if the runtime is closed, or the engine is a policy.
        """
        return self.pipeline.preparer.tokenizer

    def close(self) -> None:
        """Free engines and buffers after the running batch of `handle_request`.

        Submitted requests that have not ended fail with an EngineError, and later calls raise one. Not to be
        called from a callback of a request.
        """
        self._scheduler.close()
        with self._lock:
            opened, self._opened = self._opened, None
            if isinstance(opened, PolicyPipeline):
                opened.close()

    @property
    def closed(self) -> bool:
        return self._opened is None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def speculative_decoding_strategy_name(self) -> str:
        """Drafter: "eagle", "mtp", "dflash" or "lookup"; "" without one."""
        return self._metrics.spec_decode.strategy

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft head is loaded."""
        return self.speculative_decoding_strategy_name in HEAD_KINDS

    def gen_and_save_system_prompt_kv_cache(self, system_prompt: str, lora: str = "") -> int:
        """Prefill and save the prefix that all prompts of this system prompt share.

        Returns the number of tokens of the prefix. The prefix cache does not evict the prefix until
        `release_system_prompt_kv_cache` is called. `clear_prefix_cache`, `load_prefix_cache`, the removal of
        the adapter and an EngineError drop the prefix too. To save it again has no effect. ValueError if the
        system prompt is empty, too long for the engine, or longer than the part of the prefix cache that
        other saved prompts leave, and for an unknown adapter.
        """
        with self._lock:
            pipeline = self.pipeline
            clock = StageClock(pipeline.device.mark)
            sequence = pipeline.prepare_system_prompt(system_prompt, lora)
            pipeline.reuse.match([sequence])
            clock.end("tokenize_s")
            try:
                pipeline.prefill([sequence])
                clock.end("prefill_s")
                pipeline.store_prefixes([sequence])
                pipeline.batch.evict([sequence])
                clock.end("keep_s")
                seconds = clock.metrics()
            except BaseException as error:
                recover_after(pipeline, error)
                raise
            self._metrics.add_seconds(seconds)
            tokens = len(sequence.token_ids)
            stored = pipeline.reuse.stored_length(sequence)
            if stored < tokens:
                size, pinned = pipeline.prefixes.capacity_bytes, pipeline.prefixes.pinned_bytes
                saved = f", {pinned} bytes of it are saved system prompts: release one" if pinned else ""
                raise ValueError(
                    f"the prefix cache of {size} bytes has room for {stored} of {tokens} tokens{saved}"
                )
            pipeline.reuse.pin(sequence)
            return tokens

    def release_system_prompt_kv_cache(self, system_prompt: str, lora: str = "") -> None:
        """Let the prefix cache evict a saved system prompt again, when it needs room.

        ValueError if this system prompt is not saved for this adapter, or for an unknown adapter.
        """
        with self._lock:
            pipeline = self.pipeline
            sequence = pipeline.preparer.prepare_system_prompt(system_prompt, lora)
            if not pipeline.reuse.unpin(sequence):
                name = sequence.adapter.name
                whose = f"the adapter {quoted(name)}" if name else "the base model"
                raise ValueError(f"the system prompt {quoted(system_prompt)} is not saved for {whose}")

    def save_prefix_cache(self, path: str | Path) -> None:
        """Save the prefix cache to a file. OSError if the file cannot be written."""
        with self._lock:
            pipeline = self.pipeline
            pipeline.drop_removed_adapters()
            reuse, engine = pipeline.reuse, engine_fingerprint(self.config, self.has_draft_model)
            save_prefix_cache(path, reuse.pages, pipeline.device, engine, reuse.states)

    def load_prefix_cache(self, path: str | Path) -> int:
        """Load a saved prefix cache in place of the current one.

        Returns the number of loaded pages; the least recently used pages of the file are left out if the
        cache has no room for them. FileNotFoundError, or ValueError for a file that is damaged or belongs to
        another engine: then the cache stays unchanged. EngineError if the device fails: then the cache is
        empty.
        """
        with self._lock:
            pipeline = self.pipeline
            reuse, engine = pipeline.reuse, engine_fingerprint(self.config, self.has_draft_model)
            return load_prefix_cache(path, reuse.pages, pipeline.device, engine, reuse.states)

    def clear_prefix_cache(self) -> None:
        """Drop all that the prefix cache has stored."""
        with self._lock:
            self.pipeline.reuse.clear()

    def set_lm_head_weights(self, name: str, weights: object) -> None:
        """Replace the base LM head `lm_head.weight` [H,V], from the next request on.

        The old weights are overwritten; `add_lm_head` keeps them. weights: an array on the host, or one on
        the runtime's GPU (DLPack or CUDA array interface) in the engine's type, which is copied there.
        EngineError if the engine was not exported with `lm_head_input`, or for another name, shape or type.
        """
        with self._lock:
            self.pipeline.runner.set_lm_head_weights(name, weights)

    def add_lm_head(self, name: str, weights: object) -> None:
        """Add an LM head [H,V] under a new name, which requests may choose.

        weights: an array on the host, which is copied to the device once; or one on the runtime's GPU (DLPack
        or CUDA array interface) in the engine's type, row-major, which is used in place: it must not change
        until the head is removed. EngineError if the engine was not exported with `lm_head_input`, or for
        another shape or type; ValueError for a name that is taken: then nothing has changed.
        """
        with self._lock:
            self.pipeline.runner.lm_heads.add(name, weights)

    def remove_lm_head(self, name: str) -> None:
        """Remove an LM head after the running batch.

        ValueError for the active head and an unknown name.
        """
        with self._lock:
            self.pipeline.remove_lm_head(name)

    def lm_head_names(self) -> list[str]:
        """Return the names of the added LM heads, sorted; a policy has none."""
        return self._answerer.lm_heads.names()

    def switch_lm_head(self, name: str) -> None:
        """Set the active LM head: used by requests that name none.

        "" or "base" is that of the engine directory. Nothing is copied; the running batch keeps its heads.
        ValueError for an unknown name: then the active head stays the same.
        """
        self._answerer.lm_heads.switch(name)

    @property
    def active_lm_head(self) -> str:
        """Name of the LM head for requests that name none; "" is the base head."""
        return self._answerer.lm_heads.active

    def add_lora(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter that PEFT saved, under a new name.

        directory: PEFT's, or one `.safetensors` file (docs/lora.md). Requests may name the adapter once this
        call returns. ValueError or FileNotFoundError if the adapter cannot be loaded: then nothing has
        changed.
        """
        self.pipeline.loras.add(name, directory)

    def remove_lora(self, *names: str) -> None:
        """Remove adapters, all or none.

        The running batch keeps its adapters; the prefixes of the removed adapters are dropped when the next
        batch begins. ValueError for the active adapter and for unknown names: then no adapter is removed.
        """
        self.pipeline.remove_loras(names)

    def lora_names(self) -> list[str]:
        """Return the names of the loaded adapters, sorted; a policy has none."""
        return self._answerer.loras.names()

    def switch_lora_weights(self, name: str) -> None:
        """Set the active adapter: used by requests that name none.

        "" or "base" is the base model. Nothing is copied; the running batch keeps its adapters. ValueError
        for an unknown name: then the active adapter stays the same.
        """
        self._answerer.loras.switch(name)

    @property
    def active_lora(self) -> str:
        """Name of the adapter for requests that name none.

        "" is the base model, and for a policy.
        """
        return self._answerer.loras.active
