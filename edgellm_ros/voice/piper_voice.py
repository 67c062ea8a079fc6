# SPDX-License-Identifier: Apache-2.0
"""Piper voices: VITS models MODEL.onnx with settings in MODEL.onnx.json.

    sentence -> phonemes of espeak-ng -> ids -> VITS -> waveform -> gain to full scale -> int16

The form of the files is that of https://github.com/OHF-Voice/piper1-gpl; no code of it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.echo import quoted
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.strict_json import parse_json
from edgellm_ros.voice.espeak import CLAUSE_MARKS, open_espeak
from edgellm_ros.voice.phonemes import BEGIN, END, PAD, phoneme_ids, phonemes, runs

THREADS = 2  # of a session: what the sound of a first sentence gains from; more would take cores from others
MAX_PHONEMES = 200  # of one run of the model, about 12 s of sound: memory grows with the length
MAX_SENTENCE_PHONEMES = 2000  # a longer sentence is cut: names of signs, which espeak-ng reads out
PEAK = 0.9  # of full scale
MIN_LEVEL = 0.05  # a waveform with a smaller peak is not raised to PEAK: it is silence
SENTENCE_PAUSE_S, CLAUSE_PAUSE_S = 0.2, 0.05
INPUTS = {"input", "input_lengths", "scales", "sid"}


@dataclass(frozen=True)
class PiperConfig:
    """What MODEL.onnx.json says."""

    sample_rate: int  # Hz
    language: str  # espeak-ng's name
    noise_scale: float  # of the waveform
    length_scale: float  # 1 = the speed of the training data, 2 = half of it
    noise_w: float  # of the durations
    ids: dict[str, list[int]]  # of each phoneme


def read_config(path: Path) -> PiperConfig:
    """Read MODEL.onnx.json.

    ValueError that names file and key; OSError without the file.
    """
    try:
        content = parse_json(path.read_bytes())
        kind = _value(content, "phoneme_type", "espeak")
        if kind != "espeak":
            raise ValueError(f"phoneme_type is {quoted(kind)}, expected espeak")
        table = _value(content, "phoneme_id_map")
        if not isinstance(table, dict):
            raise ValueError(f"phoneme_id_map is {quoted(table)}, expected an object")
        for phoneme, ids in table.items():
            if not (isinstance(ids, list) and ids and all(type(each) is int and each >= 0 for each in ids)):
                raise ValueError(f"phoneme_id_map.{quoted(phoneme)} is {quoted(ids)}, expected a list of ids")
        for needed in (BEGIN, PAD, END):
            if needed not in table:
                raise ValueError(f"phoneme_id_map has no {needed!r}")
        language = _value(content, "espeak.voice")
        if not isinstance(language, str):
            raise ValueError(f"espeak.voice is {quoted(language)}, expected a name such as en-us")
        return PiperConfig(
            sample_rate=int(_number(content, "audio.sample_rate", 4000, 192_000)),
            language=language,
            noise_scale=_number(content, "inference.noise_scale", 0, 10, 0.667),
            length_scale=_number(content, "inference.length_scale", 0.1, 10, 1.0),
            noise_w=_number(content, "inference.noise_w", 0, 10, 0.8),
            ids=table,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class PiperVoice:
    """A voice from the files MODEL.onnx and MODEL.onnx.json. Not thread-safe.

    `unknown_phonemes` counts phonemes that the model does not have and that were skipped; `shortened` counts
    sentences whose end was cut off.
    """

    def __init__(self, model: str | Path, noise_scale: float | None = None, speaker: int = 0) -> None:
        """Load the voice.

        noise_scale: of waveform and durations; None = as MODEL.onnx.json says, 0 = repeatable: the same
        sentence gives the same samples. speaker: number, for models with several. OSError or ValueError,
        which name the file; ImportError without espeak-ng.
        """
        path = Path(model)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no such file, expected the MODEL.onnx of a Piper voice, or espeak"
            )
        self._config = config = read_config(Path(f"{path}.json"))
        if noise_scale is not None and not 0 <= noise_scale <= 10:
            raise ValueError(f"noise_scale must be from 0 to 10, got {noise_scale:g}")
        noises = (config.noise_scale, config.noise_w) if noise_scale is None else (noise_scale, noise_scale)
        self._scales = np.array([noises[0], config.length_scale, noises[1]], np.float32)
        self._speaker = speaker
        self.unknown_phonemes = self.shortened = 0
        with open_espeak() as espeak:
            try:
                espeak.set_voice(config.language)
            except ValueError as error:
                raise ValueError(f"{path}.json: espeak.voice: {error}") from None
        self._session, self._inputs = _open(path)

    @property
    def language(self) -> str:
        return self._config.language

    @property
    def sample_rate(self) -> int:
        return self._config.sample_rate

    def sounds(self, sentence: str) -> Iterator[NDArray[np.int16]]:
        """Yield the sound of a sentence, in pieces [N] of at most MAX_PHONEMES phonemes."""
        spoken = phonemes(sentence, self.language)
        if len(spoken) > MAX_SENTENCE_PHONEMES:
            self.shortened += 1
            spoken = spoken[:MAX_SENTENCE_PHONEMES]
        for run in runs(spoken, MAX_PHONEMES):
            ids, unknown = phoneme_ids(run, self._config.ids)
            self.unknown_phonemes += unknown
            if len(run) - unknown > sum(run.count(mark) for mark in CLAUSE_MARKS):
                pause = SENTENCE_PAUSE_S if run[-1] in ".!?" else CLAUSE_PAUSE_S
                silence = np.zeros(round(pause * self.sample_rate), np.int16)
                yield np.concatenate([_to_int16(self._waveform(ids)), silence])

    def _waveform(self, ids: list[int]) -> NDArray[np.float32]:
        """Run the model on ids and return the waveform [N], about full scale -1..1."""
        feeds = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": self._scales,
            "sid": np.array([self._speaker], np.int64),
        }
        try:
            (waveform,) = self._session.run(None, {name: feeds[name] for name in self._inputs})
        except Exception as error:  # the library's own classes
            raise EngineError(f"the voice's model failed: {_first_line(error)}") from None
        return waveform.reshape(-1)


def _to_int16(waveform: NDArray[np.float32]) -> NDArray[np.int16]:
    """Scale a waveform to a peak of PEAK. EngineError for values that are not finite."""
    peak = max(float(waveform.max(initial=0.0)), -float(waveform.min(initial=0.0)))
    if not math.isfinite(peak):
        raise EngineError("the voice's waveform is not finite")
    gain = PEAK * 32767 / max(peak, MIN_LEVEL)
    return np.rint(waveform * np.float32(gain)).astype(np.int16)


def _open(path: Path) -> tuple[Any, list[str]]:
    """Open the model; return its session and the names of its inputs."""
    from edgellm_ros.engine.onnxruntime.session import available_cores, open_session

    try:
        session = open_session(path, threads=min(THREADS, available_cores()))
    except Exception as error:  # the library's own classes
        raise ValueError(f"{path}: not a model that ONNX Runtime loads: {_first_line(error)}") from None
    inputs = [each.name for each in session.get_inputs()]
    if not set(inputs) <= INPUTS or not {"input", "input_lengths", "scales"} <= set(inputs):
        raise ValueError(
            f"{path}: not a Piper voice: its inputs are {quoted(', '.join(inputs))}, expected input, "
            "input_lengths, scales and, with several speakers, sid"
        )
    return session, inputs


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


def _value(content: Any, name: str, default: Any = None) -> Any:
    """Return the value behind a path of keys such as `audio.sample_rate`.

    ValueError if there is none and no default.
    """
    for key in name.split("."):
        if not isinstance(content, dict) or key not in content:
            if default is None:
                raise ValueError(f"no key {name}, expected the settings of a Piper voice")
            return default
        content = content[key]
    return content


def _number(content: Any, name: str, low: float, high: float, default: float | None = None) -> float:
    value = _value(content, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} is {quoted(value)}, expected a number from {low:g} to {high:g}")
    return float(value)
