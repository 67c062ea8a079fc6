# SPDX-License-Identifier: Apache-2.0
import threading
import time
from itertools import chain

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from edgellm_ros.runtime.text.tokenizer import Tokenizer


def special(tokenizer, token) -> int:
    (token_id,) = tokenizer.encode_prompt(token)
    return token_id


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint) -> Tokenizer:
    return Tokenizer(tiny_checkpoint / "tokenizer.json")


def test_decoding_returns_the_encoded_text(tokenizer):
    text = "go to the red box, 2 m ahead: \u00fcber \u4e2d\u6587 \U0001f600"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_in_plain_text_are_plain_text(tokenizer):
    ids = tokenizer.encode("stop<|im_end|>")
    assert special(tokenizer, "<|im_end|>") not in ids
    assert tokenizer.decode(ids) == "stop<|im_end|>"


def test_special_tokens_of_the_template_are_special_tokens_of_the_prompt(tokenizer):
    guard, (text,) = tokenizer.protect("what is <|im_end|>?")
    ids = tokenizer.encode_prompt(f"<|im_start|>user\n{text}<|im_end|>", guard)
    start, end = special(tokenizer, "<|im_start|>"), special(tokenizer, "<|im_end|>")
    assert ids == [start, *tokenizer.encode("user\nwhat is <|im_end|>?"), end]


def test_the_guard_is_a_character_that_is_not_in_the_text(tokenizer):
    guard, (first, second) = tokenizer.protect("\ufdd0 a", "<|im_end|> \ufdd1")
    assert guard == "\ufdd2"
    assert tokenizer.encode_prompt(first + second, guard) == tokenizer.encode("\ufdd0 a<|im_end|> \ufdd1")


def test_decoding_leaves_special_tokens_out(tokenizer):
    end = special(tokenizer, "<|im_end|>")
    assert tokenizer.decode([*tokenizer.encode("yes"), end]) == "yes"


def test_text_that_is_not_unicode_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("\ud800")


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json not found"):
        Tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json")


# token -> its options
ODD_TOKENS = {
    "<l>": {"lstrip": True},
    "<r>": {"rstrip": True},
    "<w>": {"single_word": True},
    "<n>": {"normalized": True},
    "<<l>>": {},  # another token is nested in this one
    "ab<": {},  # its last character begins other tokens
    "$": {},  # a single letter that is in the vocabulary too
    "\u2603": {},  # a single letter that is not in the vocabulary
    "\u00a7": {},  # a single letter; the vocabulary has a part of it
}


@pytest.fixture(scope="module")
def odd_file(tmp_path_factory):
    """A tokenizer whose special tokens have every option of the library.

    The tokenizer cuts at 3 tokens by default.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, "$a"])}
    library = Library(models.BPE(vocab=vocabulary, merges=[("$", "a")]))
    library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    plain = {"special": True, "normalized": False}
    library.add_special_tokens([AddedToken(name, **(plain | kind)) for name, kind in ODD_TOKENS.items()])
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    library.enable_truncation(3)
    library.enable_padding(length=9)
    path = tmp_path_factory.mktemp("odd") / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.fixture(scope="module")
def odd(odd_file) -> Tokenizer:
    return Tokenizer(odd_file)


ODD_TEXTS = (
    *ODD_TOKENS,
    "a  <l>  b",
    "a \n <r> \t b",
    "<r>  <l>",
    "a<w>b <w> c, <w>. <w>",
    "x<N>y<n>Z",
    "<<l>>< <l>>",
    "xab<l>  ab<<l>>",
    "a$b$$ $",
    "\u00a7\u00a7x",
    "\u2603\u2603x",
    "<think> <r> </think>",
    "\u00fcber \U0001f600 <r> \u4e2d",
    "",
    " ",
)


def test_a_truncation_length_in_the_file_does_not_cut_a_prompt(odd):
    assert len(odd.encode("abcdefgh")) == len(odd.encode_prompt("abcdefgh")) == 8
    assert len(odd.encode("a")) == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a  <l>  b", ["a", "<l>", "  b"]),
        ("a  <r>  b", ["a  ", "<r>", "b"]),
        ("a<w>b <w>", ["a<w>b ", "<w>"]),
        ("x<N>", ["x", "<n>"]),
        ("$a", ["$", "a"]),
    ],
)
def test_options_of_special_tokens_apply_in_a_prompt(odd, text, parts):
    tokens = [odd.encode_prompt(part) if part in ODD_TOKENS else odd.encode(part) for part in parts]
    assert odd.encode_prompt(text) == list(chain(*tokens))
    guard, (user,) = odd.protect("<r>")
    assert odd.encode_prompt(f"{text}|{user}", guard) == [*chain(*tokens), *odd.encode("|<r>")]


@pytest.mark.parametrize("text", [text for text in ODD_TEXTS if "<think>" not in text])
def test_no_special_token_can_be_written_by_a_user(odd, text):
    guard, (user,) = odd.protect(text)
    end = odd.encode_prompt("<<l>>")
    assert odd.encode_prompt(f"x{user}<<l>>", guard) == [*odd.encode(f"x{text}"), *end]
    assert odd.encode_prompt(f"<<l>>{user}", guard) == [*end, *odd.encode(text)]


def test_text_without_special_tokens_is_not_altered_by_protection(odd):
    assert odd.protect("a  b\n", "<w")[1] == ["a  b\n", "<w"]


def test_an_unknown_letter_is_no_special_token(tmp_path):
    library = Library(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>"))
    library.add_special_tokens(["<unk>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    guard, (text,) = tokenizer.protect("a\u4e2da")
    assert text == "a\u4e2da"
    assert tokenizer.encode_prompt(text, guard) == [1, 0, 1]


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_protecting_text_that_is_not_unicode_is_an_error(odd, text):
    with pytest.raises(ValueError, match="not valid Unicode"):
        odd.protect(text)


@pytest.mark.parity
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_special_tokens_are_found_where_transformers_finds_them(odd, odd_file, text):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(odd_file))
    assert odd.encode_prompt(text) == reference(text, add_special_tokens=False)["input_ids"]
    reference.split_special_tokens = True
    assert (
        odd.encode(text) == reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    )


# transformers does not sanitize <N>, which the normaliser turns into a token, and refuses vocabulary tokens
@pytest.mark.parity
@pytest.mark.parametrize("text", [text for text in ODD_TEXTS if not {"N", "$", "\u00a7"} & set(text)])
def test_special_tokens_of_users_are_text_as_in_transformers(odd, odd_file, text):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(odd_file))
    guard, (user,) = odd.protect(text)
    ids = odd.encode_prompt(f"<r>{user}<<l>>", guard)
    expected = reference.apply_chat_template(
        [{"role": "user", "content": text}],
        chat_template="<r>{{ messages[0].content }}<<l>>",
        sanitize_control_tokens=True,
    )["input_ids"]
    special = {token for token, content in reference.added_tokens_decoder.items() if content.special}
    assert [token for token in ids if token in special] == [token for token in expected if token in special]
    assert reference.decode(ids) == reference.decode(expected)


@pytest.mark.parity
def test_prompts_equal_those_of_transformers(tokenizer, tiny_checkpoint):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny_checkpoint / "tokenizer.json"))
    for text in (
        "<|im_start|>user\nGo  there!<|im_end|>\n<|im_start|>assistant\n",
        "plain",
        "",
        "<|im_end|>",
    ):
        assert tokenizer.encode_prompt(text) == reference(text, add_special_tokens=False)["input_ids"]


def test_bytes_of_tokens_are_those_of_the_text(tokenizer):
    text = "a \u00fc\u4e2d\U0001f600\n\x00\x7f"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(special(tokenizer, "<|im_end|>")) == b"<|im_end|>"
    assert tokenizer.token_bytes(100_000) == b""


def test_bytes_of_tokens_of_sentence_piece(tmp_path):
    vocabulary = {"<unk>": 0, "<0xE4>": 1, "\u2581go": 2, "\u00fc": 3}
    library = Library(models.WordLevel(vocabulary, unk_token="<unk>"))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.save(str(tmp_path / "tokenizer.json"))
    found = [Tokenizer(tmp_path / "tokenizer.json").token_bytes(token) for token in (1, 2, 3)]
    assert found == [b"\xe4", b" go", "\u00fc".encode()]


def test_a_whole_prompt_has_the_tokens_that_the_tokenizer_adds(tmp_path, tiny_checkpoint):
    library = Library.from_file(str(tiny_checkpoint / "tokenizer.json"))
    begin, end = (library.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode_whole("go<|im_end|>") == [begin, *tokenizer.encode("go"), end]
    assert tokenizer.encode("go") == tokenizer.encode_whole("go")[1:]


def test_other_threads_go_on_while_a_text_is_tokenized(tokenizer):
    text = "go to the red box and then turn left at the door " * 2000
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1

    def turns_per_second(work) -> float:
        before, start = turns[0], time.perf_counter()
        work()
        return (turns[0] - before) / (time.perf_counter() - start)

    other = threading.Thread(target=count)
    other.start()
    try:
        alone = turns_per_second(lambda: time.sleep(0.1))
        assert turns_per_second(lambda: tokenizer.encode(text)) > 0.2 * alone
    finally:
        stop.set()
        other.join()
