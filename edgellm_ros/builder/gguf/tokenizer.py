# SPDX-License-Identifier: Apache-2.0
"""`tokenizer.json` of a GGUF file, and what transformers keeps beside it.

Source of the pieces of SentencePiece: transformers, convert_slow_tokenizer.py.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from edgellm_ros.builder.config.byte_level import PRE_TOKENIZERS, byte_level_tokenizer
from edgellm_ros.builder.gguf.reader import GgufFile
from edgellm_ros.echo import quoted

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # of `tokenizer.ggml.token_type`
# Control tokens that end an answer, whatever the file names as its end.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>")
SPACE = "\u2581"  # SentencePiece's letter for a space


class Vocabulary:
    """The tokens of a file.

    ValueError, which names file and key, if they are not supported.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int, len(self.tokens), [NORMAL] * len(self.tokens))
        if not self.tokens or len(set(self.tokens)) != len(self.tokens):
            raise self._fail("tokens", "expected different tokens")

    def tokenizer(self) -> Tokenizer:
        """Make the tokenizer; ValueError as above."""
        kind = self._file.keys.get("tokenizer.ggml.model")
        if kind not in ("gpt2", "llama"):
            raise self._fail(
                "model", f"{quoted(kind)}, supported: gpt2 (byte-level BPE), llama (SentencePiece)"
            )
        tokenizer = self._byte_level() if kind == "gpt2" else self._sentence_piece()
        self._add_tokens(tokenizer)
        return tokenizer

    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens as `tokenizer_config.json` has them."""
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        numbers = {given: self._number(f"{name}_token_id") for name, given in names.items()}
        return {
            f"{name}_token": self.tokens[number] for name, number in numbers.items() if number is not None
        }

    def stop_tokens(self) -> list[int]:
        """Return the tokens that end an answer: those of the keys, and known ends."""
        named = [self._number(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        ids = {token: i for i, token in enumerate(self.tokens) if self.types[i] == CONTROL}
        known = [ids.get(token) for token in ENDS]
        return list(dict.fromkeys(number for number in (*named, *known) if number is not None))

    def _byte_level(self) -> Tokenizer:
        name = self._file.keys.get("tokenizer.ggml.pre", "gpt-2")
        if name not in PRE_TOKENIZERS:
            raise self._fail("pre", f"{quoted(name)}, supported: {', '.join(sorted(PRE_TOKENIZERS))}")
        merges = []
        for merge in self._list("merges", str):
            left, found, right = merge[:1], " " in merge[1:], ""
            if found:
                left, _, right = merge[1:].partition(" ")
                left = merge[:1] + left
            if not found or not right:
                raise self._fail("merges", f"{quoted(merge)}: expected two tokens")
            merges.append((left, right))
        try:
            return byte_level_tokenizer(name, {token: i for i, token in enumerate(self.tokens)}, merges)
        except Exception as error:  # the library has no class of its own
            raise self._fail("merges", str(error)) from None

    def _sentence_piece(self) -> Tokenizer:
        scores = self._list("scores", float, len(self.tokens))
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        unknown = self._number("unknown_token_id") or 0
        model = models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, dict(zip(self.tokens, scores, strict=True))),
            unk_token=self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        prefix = self._file.keys.get("tokenizer.ggml.add_space_prefix", True)
        before = [normalizers.Prepend(SPACE)] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
        after = [decoders.Strip(" ", 1, 0)] if prefix else []
        parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
        tokenizer.decoder = decoders.Sequence(parts)
        return tokenizer

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        added = [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
        tokenizer.add_tokens(added)

    def _number(self, key: str) -> int | None:
        value = self._file.keys.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self._fail(key, f"{quoted(value)}: expected a token below {len(self.tokens)}")
        return value

    def _list(self, key: str, kind: type, count: int | None = None, default: list | None = None) -> list:
        value = self._file.keys.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, list) or any(not isinstance(each, kind) for each in value):
            raise self._fail(key, f"expected a list of {kind.__name__}")
        if count is not None and len(value) != count:
            raise self._fail(key, f"{len(value)} entries for {count} tokens")
        return value

    def _fail(self, key: str, reason: str) -> ValueError:
        return ValueError(f"{self._file.path}: tokenizer.ggml.{key}: {reason}")


def _merges(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that are a piece, the highest score first."""
    pairs = []
    for piece, score in scores.items():
        for place in range(1, len(piece)):
            left, right = piece[:place], piece[place:]
            if left in vocabulary and right in vocabulary:
                pairs.append((-score, vocabulary[piece], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(pairs)]
