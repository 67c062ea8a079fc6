# SPDX-License-Identifier: Apache-2.0
"""The espeak-ng library: phonemes of a text, and espeak-ng's own sound.

espeak-ng comes as the wheel `espeakng-loader`, which is imported when `open_espeak` is called. The library
keeps its state in globals, so one thread uses it at a time.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.echo import quoted

ESPEAK_RATE = 22050  # Hz
RATE, PITCH, PITCH_RANGE, WORD_GAP = 1, 3, 4, 7  # espeak_PARAMETER
CLAUSE_MARKS = ".,;:!?"
_MARKS = {mark: mark for mark in CLAUSE_MARKS} | {
    "。": ".",
    "．": ".",
    "।": ".",
    "۔": ".",
    "，": ",",
    "、": ",",
}
_MARKS |= {"،": ",", "；": ";", "؛": ";", "：": ":", "！": "!", "？": "?", "؟": "?"}
_END_OF_LAST = re.compile(rf"([{re.escape(''.join(_MARKS))}])[\"')\]}}»”’\s]*$")
_END = re.compile(_END_OF_LAST.pattern[:-1] + ".?$", re.DOTALL)
_SYNCHRONOUS, _DO_NOT_EXIT, _UTF8, _IPA = 2, 0x8000, 1, 2
_NOISE_SEED = 1
_in_use = threading.Lock()


class Espeak:
    """The loaded library; made by `open_espeak`."""

    def __init__(self, library: ctypes.CDLL, data: str) -> None:
        self._library = library
        self._data = data
        parts: list[NDArray[np.int16]] = []  # no reference to the object: a cycle would be freed late

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        def keep(samples, count, _events) -> int:  # type: ignore[no-untyped-def]
            if samples and count > 0:
                # No ctypes array of `count`: ctypes creates a type for every length and never frees it.
                parts.append(np.frombuffer(ctypes.string_at(samples, 2 * count), np.int16))
            return 0

        self._parts, self._keep = parts, keep  # the library has the address of `keep`
        library.espeak_SetSynthCallback(keep)
        library.espeak_ng_SetRandSeed(ctypes.c_long(_NOISE_SEED))

    def has_variant(self, name: str) -> bool:
        """Whether there is a voice variant.

        For others espeak-ng would use another voice without an error.
        """
        return Path(self._data, "voices", "!v", name).is_file()

    def set_voice(self, name: str) -> None:
        """Choose a language, and a variant behind "+": "en-us", "en-us+m3".

        ValueError for a language that espeak-ng does not have.
        """
        if self._library.espeak_SetVoiceByName(name.encode()) != 0:
            raise ValueError(
                f"espeak-ng has no voice {quoted(name)}, expected a language such as en-us or de"
            )

    def set_parameter(self, parameter: int, value: int) -> None:
        """Set a parameter of the voice.

        RATE is in words per minute, PITCH and PITCH_RANGE are 0 to 99, WORD_GAP is in units of 10 ms.
        """
        self._library.espeak_SetParameter(parameter, value, 0)

    def synthesise(self, text: str) -> NDArray[np.int16]:
        """Return the sound of a text [N] at ESPEAK_RATE.

        A text without anything to say has no samples.
        """
        self._parts.clear()
        said = text.encode() + b"\0"
        size, flags = ctypes.c_size_t(len(said)), ctypes.c_uint(_UTF8)
        arguments = (said, size, 0, 0, 0, flags, None, None)  # 0: all of the text
        status = self._library.espeak_Synth(*arguments)
        if status != 0:
            raise RuntimeError(f"espeak-ng ended with status {status}")
        return np.concatenate(self._parts) if self._parts else np.zeros(0, np.int16)

    def phonemes(self, text: str) -> str:
        """Return the IPA phonemes of a text without NUL characters.

        espeak-ng translates clause by clause and drops the marks between clauses. The mark that ends each
        clause is kept here: a voice speaks questions and pauses by them.
        """
        translate = self._library.espeak_TextToPhonemes
        translate.restype = ctypes.c_char_p
        translate.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int]
        data = text.encode()
        buffer = ctypes.create_string_buffer(data)
        first = ctypes.addressof(buffer)
        position = ctypes.c_void_p(first)
        clauses: list[str] = []
        start = 0
        while position.value:
            spoken = translate(ctypes.byref(position), _UTF8, _IPA) or b""
            end = len(data) if not position.value else position.value - first
            mark = _last_mark(data[start:end], not position.value)
            clauses.append(spoken.decode(errors="ignore") + mark)
            if end <= start:  # no progress: a library that never ends would stop the caller
                break
            start = end
        return " ".join(clause for clause in clauses if clause.strip(CLAUSE_MARKS))


@contextlib.contextmanager
def open_espeak() -> Iterator[Espeak]:
    """Load the library for this thread while the context lasts.

    The library's state after one sentence (phase of the voice, echoes, noise) would change the next sentence,
    and espeak_Terminate does not clear that state. Each use therefore loads the library again, which takes 3
    ms. ImportError where the wheel is not installed.
    """
    try:
        import espeakng_loader
    except ImportError as error:
        raise ImportError(f"no espeak-ng ({error}): pip install espeakng-loader==0.2.4") from None
    data, path = espeakng_loader.get_data_path(), espeakng_loader.get_library_path()
    voices = None
    with _in_use:
        library = ctypes.CDLL(path)
        try:
            if library.espeak_Initialize(_SYNCHRONOUS, 0, data.encode(), _DO_NOT_EXIT) != ESPEAK_RATE:
                raise RuntimeError(f"espeak-ng cannot use its data in {data}")
            # Otherwise espeak_SetVoiceByName makes this list, and no code frees it.
            library.espeak_ListVoices.restype = ctypes.c_void_p
            voices = library.espeak_ListVoices(None)
            yield Espeak(library, data)
            library.espeak_Terminate()
        finally:
            _unload(library, path, voices)


def _last_mark(clause: bytes, is_last: bool) -> str:
    """Return the mark that ends a clause; empty if there is none.

    All clauses but the last one have the first character of the next one at their end: espeak-ng has read it.
    """
    found = (_END_OF_LAST if is_last else _END).search(clause.decode(errors="ignore"))
    return _MARKS[found.group(1)] if found else ""


def _unload(library: ctypes.CDLL, path: str, voices: int | None) -> None:
    """Unload the library and free its list of voices.

    The list is kept if other code has the library loaded too.
    """
    _ctypes.dlclose(library._handle)
    try:
        kept = ctypes.CDLL(path, os.RTLD_NOLOAD)
    except OSError:
        free = ctypes.CDLL(None).free
        free.argtypes, free.restype = [ctypes.c_void_p], None
        free(voices)
    else:
        _ctypes.dlclose(kept._handle)
