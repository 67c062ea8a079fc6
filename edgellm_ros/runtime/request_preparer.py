# SPDX-License-Identifier: Apache-2.0
"""RequestPreparer: checks requests and makes their prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from edgellm_ros.diffusion.action_runner import ActionRunner
from edgellm_ros.diffusion.trajectory_history import check_history, history_speed, history_tokens
from edgellm_ros.engine_directory.navigation import check_navigation
from edgellm_ros.engine_directory.parts import ACTION, AUDIO, VISUAL, EngineParts
from edgellm_ros.interruptible import InterruptedWorkError
from edgellm_ros.multimodal.audio.runner import AudioRunner
from edgellm_ros.multimodal.video import Video
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.adapters.lora import BASE, LoraAdapter, LoraAdapters
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.engines.lm_heads import LMHeads
from edgellm_ros.runtime.grammar.grammar import Grammars
from edgellm_ros.runtime.prefix.prefix_cache import Prefix
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.prompt.rope import get_rope_index, plain_rope_index
from edgellm_ros.runtime.prompt.video_layout import VideoLayout, lay_out_video, lay_out_video_with_sound
from edgellm_ros.runtime.request import LLMGenerationRequest, check_speed
from edgellm_ros.runtime.text.text_stream import TextStream
from edgellm_ros.runtime.text.tokenizer import Tokenizer


class RequestPreparer:
    """Checks requests against the engine's parts and limits, and makes their prompts."""

    def __init__(
        self,
        parts: EngineParts,
        tokenizer: Tokenizer,
        prompts: PromptBuilder,
        loras: LoraAdapters,
        lm_heads: LMHeads,
        vision: VisionRunner | None,
        audio: AudioRunner | None,
        action: ActionRunner | None,
        grammars: Grammars,
    ) -> None:
        self._parts = parts
        self._config = parts.config
        self.tokenizer = tokenizer
        self._prompts = prompts
        self._loras = loras
        self._lm_heads = lm_heads
        self._vision = vision
        self._audio = audio
        self._action = action
        self._grammars = grammars

    def prepare(self, requests: Sequence[LLMGenerationRequest], noise_seed: int) -> list[GenerationSequence]:
        """Make the sequences of a batch.

        `noise_seed` is for requests without one. ValueError names the first invalid request; then the whole
        batch is refused.
        """
        limit = self._config.builder.max_batch_size
        if not 1 <= len(requests) <= limit:
            raise ValueError(
                f"a batch of {len(requests)} requests; this engine takes 1 to {limit} (max_batch_size)"
            )
        if len(requests) > 1 and any(request.guidance is not None for request in requests):
            raise ValueError(f"a request with guidance must be alone, got a batch of {len(requests)}")
        sequences: list[GenerationSequence] = []
        for index, request in enumerate(requests):
            try:
                first_row = sequences[-1].end_row if sequences else 0
                sequences.append(self._prepare(request, first_row, noise_seed))
                sequences[-1].request_index = index
            except ValueError as error:
                raise ValueError(f"request {index}: {error}" if len(requests) > 1 else str(error)) from None
        return sequences

    def prepare_system_prompt(self, system_prompt: str, lora: str) -> GenerationSequence:
        """Make a sequence of the prefix that all prompts of a system prompt share.

        ValueError if the system prompt is empty, too long, or not the first part of the chat template.
        """
        request = LLMGenerationRequest("", system_prompt=system_prompt, lora=lora)
        token_ids = self._prompts.system_prefix(system_prompt)
        sequence = self._make_sequence(request, token_ids, [], [], [], first_row=0)
        sequence.begins_later_prompts = True
        return sequence

    def prepare_next_turn(self, answered: GenerationSequence) -> GenerationSequence | None:
        """Make a sequence of the ids that the next turn of a conversation begins with.

        The sequence has the encoder rows of the answered sequence, which must not have been overwritten. None
        if there can be no next turn: the request has no messages, the prompt would be too long, or the chat
        template refuses it.
        """
        if answered.request.messages is None:
            return None
        request = dataclasses.replace(answered.request, on_progress=None, cancel=None)
        grids, videos, sounds = answered.image_grids, answered.videos, answered.audio_tokens
        own = _own_sounds(request, sounds)
        try:
            token_ids = self._prompts.next_turn_prefix(
                request, answered.text.text, answered.image_tokens, own, _token_ids(videos)
            )
            turn = self._make_sequence(request, token_ids, grids, videos, sounds, answered.first_row)
        except ValueError:
            return None
        turn.adapter, turn.encoded_rows = answered.adapter, answered.encoded_rows
        turn.request_index = answered.request_index
        turn.begins_later_prompts = True
        return turn

    def prepare_again(self, begun: GenerationSequence) -> GenerationSequence:
        """Make a sequence like one that was begun, as it was before its first token."""
        before = begun.token_ids[-1:] if begun.request.continue_final_message else ()
        return dataclasses.replace(
            begun,
            text=TextStream(self.tokenizer, begun.sampling.stop, before),
            grammar=begun.grammar.again() if begun.grammar is not None else None,
            encoded_rows=set(),
            prefix=Prefix(),
            reused_tokens=0,
            state_points=[],
            kv_length=0,
            steps=0,
            generated=[],
            logprobs=[],
            hidden_states=[],
            finish_reason="",
            sampling_actions=None,
            _trigger_row_pending=False,
        )

    def adapter_of(self, sequence: GenerationSequence) -> LoraAdapter:
        """Find the adapter of a sequence again, which was prepared some time ago.

        ValueError if the adapter or the LM head was removed.
        """
        adapter = self._loras.get(sequence.adapter.name or BASE)
        return self._lm_heads.apply(adapter, sequence.adapter.lm_head or BASE)

    def _prepare(self, request: LLMGenerationRequest, first_row: int, noise_seed: int) -> GenerationSequence:
        self._check_against_engine(request)
        history, speed = self._motion(request)
        images, sounds = request.prompt_images, request.prompt_audio
        grids = [self._vision.token_grid(image) for image in images] if self._vision else []
        image_tokens = [height * width for height, width in grids]
        videos = [self._lay_out(video) for video in request.prompt_videos]
        audio_tokens = [self._audio.num_tokens(sound) for sound in sounds] if self._audio else []
        own = _own_sounds(request, audio_tokens)
        token_ids = self._prompts.build(request, image_tokens, own, history, _token_ids(videos))
        sequence = self._make_sequence(request, token_ids, grids, videos, audio_tokens, first_row)
        grammar = request.sampling.grammar
        if grammar is not None:
            with suppress(InterruptedWorkError):  # then the sequence is cancelled
                sequence.grammar = self._grammars.start(grammar, lambda: not sequence.report("grammar", 0))
        sequence.speed = speed
        sequence.noise_seed = noise_seed if request.noise_seed is None else request.noise_seed
        return sequence

    def _motion(self, request: LLMGenerationRequest) -> tuple[list[int], float]:
        """Return the tokens of the trajectory history, and the speed in m/s."""
        action, speed = self._config.expert, request.speed or 0.0
        if action is None:
            return [], speed
        points = check_history(request.history, action.trajectory_history, speed)
        if request.speed is None:
            with np.errstate(over="ignore"):  # an infinite speed is refused below
                speed = history_speed(points, action.trajectory_history)
            check_speed("the speed of the history", speed)
        return history_tokens(points, action.trajectory_history), speed

    def prepare_unguided(self, answered: GenerationSequence) -> GenerationSequence:
        """Make a sequence of prompt and answer without the navigation.

        The sequence has the encoder rows of the answered sequence, which must not have been overwritten.
        """
        request = dataclasses.replace(answered.request, navigation="", guidance=None, on_progress=None)
        videos, sounds, (history, _) = answered.videos, answered.audio_tokens, self._motion(request)
        own = _own_sounds(request, sounds)
        ids = self._prompts.build(request, answered.image_tokens, own, history, _token_ids(videos))
        grids = answered.image_grids
        sequence = self._make_sequence(request, ids, grids, videos, sounds, answered.first_row)
        places = np.arange(len(ids), len(ids) + len(answered.generated), dtype=np.float32)
        rows = np.broadcast_to(places + np.float32(sequence.rope_delta), (3, len(places)))
        sequence.positions = np.concatenate([sequence.positions, rows], axis=1)
        sequence.token_ids = [*ids, *answered.generated]
        sequence.adapter, sequence.encoded_rows = answered.adapter, answered.encoded_rows
        return sequence

    def _make_sequence(
        self,
        request: LLMGenerationRequest,
        token_ids: list[int],
        grids: list[tuple[int, int]],
        videos: list[VideoLayout],
        audio_tokens: list[int],
        first_row: int,
    ) -> GenerationSequence:
        config, action, tokens = self._config, self._config.expert, self._config.special_tokens
        sampling = request.sampling.resolved(config.generation)
        if not token_ids:
            raise ValueError("the prompt has 0 tokens: the chat template rendered an empty text")
        capacity = config.builder.max_kv_cache_capacity
        if len(token_ids) >= capacity:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; this engine takes at most {capacity - 1} "
                "(max_kv_cache_capacity)"
            )
        encoded = sum(height * width for height, width in grids) + sum(audio_tokens)
        encoded += sum(video.grid.tokens for video in videos)
        if encoded > config.builder.max_input_len:
            raise ValueError(
                f"the images, videos and sounds of the prompt are {encoded} tokens; this engine takes at "
                f"most {config.builder.max_input_len} (max_input_len)"
            )
        positions, delta = plain_rope_index(len(token_ids)), 0.0
        if config.use_context_dependent_rope:
            positions, delta = get_rope_index(
                token_ids,
                grids,
                tokens.image_token_id,
                tokens.vision_start_token_id,
                [block for video in videos for block in video.blocks],
                config.video_token_id,
            )
        beyond = max(math.ceil(delta), 0)  # positions; times of a video may be beyond the number of tokens
        if len(token_ids) + beyond >= capacity:
            raise ValueError(
                f"the times of the videos reach position {len(token_ids) + beyond - 1}; this engine has "
                f"positions up to {capacity - 1} (max_kv_cache_capacity)"
            )
        room = capacity - len(token_ids) - beyond
        before = token_ids[-1:] if request.continue_final_message else ()
        return GenerationSequence(
            request=request,
            sampling=sampling,
            adapter=self._lm_heads.apply(self._loras.get(request.lora), request.lm_head),
            token_ids=token_ids,
            image_grids=grids,
            audio_tokens=audio_tokens,
            first_row=first_row,
            positions=positions,
            rope_delta=delta,
            max_tokens=min(sampling.max_tokens, room),
            stop_token_ids=config.stop_token_ids,
            future_start_token_id=action.future_start_token_id if action else None,
            text=TextStream(self.tokenizer, sampling.stop, before),
            videos=videos,
            state_layers=config.hidden_state_layers,
        )

    def _lay_out(self, video: Video) -> VideoLayout:
        config, vision = self._config, self._vision
        assert vision is not None
        assert vision.videos is not None  # `_check_against_engine` has refused the request
        grid, tokens = vision.video_grid(video), config.special_tokens
        if video.sound is not None:
            assert self._audio is not None  # as above
            sound_tokens = self._audio.num_tokens(video.sound)
            return lay_out_video_with_sound(video, grid, vision.videos, config.video, tokens, sound_tokens)
        return lay_out_video(video, grid, vision.videos, config.video, self.tokenizer, tokens)

    def _check_against_engine(self, request: LLMGenerationRequest) -> None:
        missing = self._parts.missing
        if request.prompt_images and missing(VISUAL):
            raise ValueError(f"{missing(VISUAL)}, the request has images")
        if request.prompt_videos and self._config.video is None:
            raise ValueError("this engine takes no videos, the request has a video")
        if request.prompt_videos and missing(VISUAL):
            raise ValueError(f"{missing(VISUAL)}, the request has a video")
        if any(request.sounds_of_videos) and not self._config.video.sound_chunk:
            raise ValueError(
                "this engine takes no videos with sound, the request has one: give the sound on its own"
            )
        if request.prompt_audio and missing(AUDIO):
            raise ValueError(f"{missing(AUDIO)}, the request has audio")
        if request.logprobs > self._config.llm.output_vocab_size:
            raise ValueError(
                f"logprobs {request.logprobs} exceeds the vocabulary of "
                f"{self._config.llm.output_vocab_size} tokens"
            )
        if request.output_hidden_states and not self._config.hidden_state_layers:
            raise ValueError(
                "this engine has no hidden states, the request has output_hidden_states: "
                "export it with --hidden-states"
            )
        if request.state is not None or request.cameras:
            field = "cameras" if request.state is None else "a state"
            raise ValueError(f"this engine is no policy, the request has {field}")
        check_navigation(self._config, request.navigation, request.guidance)
        if self._action is None:
            if request.history is not None and self._config.expert is None:
                raise ValueError(f"{missing(ACTION)}, the request has a history")
            if request.action_samples:
                raise ValueError(f"{missing(ACTION)}, the request has action_samples")
            if request.previous_chunk is not None:
                raise ValueError(f"{missing(ACTION)}, the request has a previous_chunk")
            return
        if request.previous_chunk is not None:
            try:
                self._action.check(request.previous_chunk)
            except ValueError as error:
                raise ValueError(f"previous_chunk: {error}") from None
        if request.action_samples > self._action.max_samples:
            raise ValueError(
                f"action_samples is {request.action_samples}; this engine takes at most "
                f"{self._action.max_samples} (max_action_samples)"
            )


def _own_sounds(request: LLMGenerationRequest, audio_tokens: Sequence[int]) -> list[int]:
    """Return the number of tokens of each sound that is not a video's."""
    counted = zip(audio_tokens, request.sounds_of_videos, strict=True)
    return [tokens for tokens, of_video in counted if not of_video]


def _token_ids(videos: Sequence[VideoLayout]) -> list[Sequence[int]]:
    return [video.token_ids for video in videos]
