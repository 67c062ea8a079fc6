# SPDX-License-Identifier: Apache-2.0
"""Scores of a speech-to-text model: speakers and rooms of the test split.

Transcripts are made in batches, by the same rules as the runtime's: greedy, with the mean log-probability of
the words' tokens as confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from edgellm_arena.words.language import sample_command
from edgellm_ros.builder.families.qwen3_asr.config import MIN_SAMPLES
from edgellm_ros.hearing.rule import WORD, HearingRule
from edgellm_ros.multimodal.audio.pcm import to_int16
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.transcript import Transcript, split_answer
from training.asr.model import Recogniser
from training.asr.sounds import NO_SPEECH, record_no_speech
from training.asr.tokens import Sequences
from training.data import MEANINGS
from training.hearing import LogMel, token_count
from training.speech import MAX_SAMPLES, heard_text, record_command

BATCH = 250
SEED = 17


@dataclass(frozen=True)
class Clip:
    """A recording, and the words that are said in it."""

    sound: Sound
    text: str  # "" = no speech


def transcribe(
    recogniser: Recogniser, sequences: Sequences, sounds: Sequence[Sound], device: str, context: str = ""
) -> list[Transcript]:
    """Write transcripts of sounds of at most 5 s at 16 kHz.

    A sound below MIN_SAMPLES is extended with silence.
    """
    log_mel, made = LogMel().to(device), list[Transcript]()
    for first in range(0, len(sounds), BATCH):
        some = sounds[first : first + BATCH]
        samples = np.zeros((len(some), MAX_SAMPLES), np.int16)
        for row, sound in zip(samples, some, strict=True):
            row[: len(sound.samples)] = to_int16(sound.samples)
        count = torch.tensor([max(len(sound.samples), MIN_SAMPLES) for sound in some])
        tokens, befores = token_count(count), [sequences.before(context)] * len(some)
        written = sequences.write(befores, tokens.tolist(), [[]] * len(some))
        batch = {name: torch.from_numpy(value).to(device) for name, value in written.items()}
        batch["features"] = log_mel(torch.from_numpy(samples).to(device), count.to(device))
        batch["audio_tokens"] = tokens.to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            ids, scores = recogniser.answers(batch, sequences.end)
        pairs = zip(ids.tolist(), scores.tolist(), strict=True)
        made += [_transcript(sequences, row, values) for row, values in pairs]
    return made


def _transcript(sequences: Sequences, ids: list[int], scores: list[float]) -> Transcript:
    end = ids.index(sequences.end) if sequences.end in ids else len(ids)
    start = ids.index(sequences.mark) + 1 if sequences.mark in ids[:end] else 0
    text, language = split_answer(sequences.tokenizer.decode(ids[:end], skip_special_tokens=True))
    confidence = sum(scores[start:end]) / (end - start) if start < end else None
    return Transcript(text.strip(), language, confidence)


def command_clips(count: int, seed: int = SEED) -> list[Clip]:
    """Record commands of the test split."""
    rng, clips = np.random.default_rng([seed, 8]), []
    for index in rng.integers(len(MEANINGS), size=count):
        text = sample_command(rng, *MEANINGS[int(index)], split="test").text
        clips.append(Clip(record_command(text, "test", rng)[0], heard_text(text)))
    return clips


def edits(found: Sequence[str], said: Sequence[str]) -> int:
    """Return the least number of inserted, missing and replaced words."""
    row = list(range(len(said) + 1))
    for i, word in enumerate(found, 1):
        diagonal, row[0] = row[0], i
        for j, wanted in enumerate(said, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != wanted))
    return row[-1]


def score_speech(transcripts: Sequence[Transcript], clips: Sequence[Clip]) -> dict[str, str]:
    """Compare transcripts with what is said.

    Sentences that HearingRule's defaults obey are counted too.
    """
    rule, wrong, words, exact, obeyed, right = HearingRule(), 0, 0, 0, 0, 0
    for transcript, clip in zip(transcripts, clips, strict=True):
        found, said = heard_text(transcript.text).split(), clip.text.split()
        wrong, words = wrong + edits(found, said), words + len(said)
        exact += found == said
        taken = bool(rule.judge(transcript, clip.sound.seconds).command)
        obeyed, right = obeyed + taken, right + (taken and found == said)
    return {
        "word error rate": f"{wrong / words:.2%} ({wrong} of {words} words)",
        "exact sentences": f"{exact} of {len(clips)}",
        "obeyed sentences": f"{obeyed} of {len(clips)}, {right} of them exact",
    }


def score_no_speech(transcripts: Sequence[Transcript], sounds: Sequence[Sound]) -> str:
    """Count the words that a robot would obey in sounds without a command."""
    rule, words, seconds = HearingRule(), 0, 0.0
    for transcript, sound in zip(transcripts, sounds, strict=True):
        words += len(WORD.findall(rule.judge(transcript, sound.seconds).command))
        seconds += sound.seconds
    return f"{words / seconds * 3600:.1f} per hour ({words} in {seconds:.0f} s)"


def score(
    recogniser: Recogniser, tokenizer: Tokenizer, device: str, clips: int, no_speech: int
) -> dict[str, str]:
    """Score commands, and as many sounds without one of each kind.

    clips: commands; no_speech: sounds of each kind. Returns the results by name.
    """
    sequences, recogniser = Sequences(tokenizer), recogniser.eval()
    spoken = command_clips(clips)
    transcripts = transcribe(recogniser, sequences, [clip.sound for clip in spoken], device)
    results = score_speech(transcripts, spoken)
    rng = np.random.default_rng([SEED, 9])
    for kind in NO_SPEECH:
        sounds = [record_no_speech(rng, "test", kind) for _ in range(no_speech)]
        transcripts = transcribe(recogniser, sequences, sounds, device)
        results[f"made-up words, {kind}"] = score_no_speech(transcripts, sounds)
    return results
