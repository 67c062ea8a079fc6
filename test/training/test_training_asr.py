# SPDX-License-Identifier: Apache-2.0
"""The trainer of a speech-to-text model, and the engine of a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

from jinja2 import Environment  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.hearing.transcriber import Transcriber  # noqa: E402
from edgellm_ros.multimodal.sound import Sound  # noqa: E402
from edgellm_ros.runtime.transcript import Transcript  # noqa: E402
from fixtures.qwen3_asr_checkpoint import TEMPLATES, TRANSFORMERS  # noqa: E402
from training.asr.__main__ import HOST_FIELDS, Clips, both_losses  # noqa: E402
from training.asr.checkpoint import CHAT_TEMPLATE, load_speech, save_speech  # noqa: E402
from training.asr.model import Recogniser, Sizes, new_model, speech_config  # noqa: E402
from training.asr.score import Clip, edits, score_no_speech, score_speech, transcribe  # noqa: E402
from training.asr.sounds import NO_MEANING, NO_SPEECH, record_no_speech, sentence_ids, transcript_writer  # noqa: E402
from training.asr.tokens import LENGTH, Sequences, sentences, train_tokenizer  # noqa: E402
from training.buffer import ReplayBuffer  # noqa: E402
from training.data import SequenceWriter  # noqa: E402
from training.hearing import LogMel, token_count  # noqa: E402
from training.speech import CLIP_FIELDS, MAX_SAMPLES, heard_text, record_command, write_clip  # noqa: E402
from training.stream import new_chunk  # noqa: E402

SIZES = Sizes(encoder=64, encoder_layers=2, channels=8, text=64, text_layers=2)
SECONDS = (0.3, 0.73, 1.5, 5.0)
SAID = ("Robot, go to the red box, please!", "stop", "what do you see?")
STEPS = 120


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(sentences(0, 300), 400)


@pytest.fixture(scope="module")
def recogniser(tokenizer) -> Recogniser:
    torch.manual_seed(0)
    return Recogniser(new_model(speech_config(tokenizer, SIZES))).eval()


@pytest.fixture(scope="module")
def sounds() -> list[Sound]:
    """Noise of 16 bits."""
    rng = np.random.default_rng(0)
    noise = [np.rint(3000 * rng.standard_normal(int(16000 * seconds))) for seconds in SECONDS]
    return [Sound((samples / 32768).astype(np.float32), 16000) for samples in noise]


def extracted(sound: Sound) -> dict[str, torch.Tensor]:
    """Return what transformers' feature extractor gives for one sound."""
    extractor = transformers.Qwen3ASRFeatureExtractor()
    made = extractor(sound.samples, sampling_rate=16000, padding=True, return_attention_mask=True)
    return {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}


@torch.no_grad()
def test_rows_of_the_encoder_are_those_of_transformers(recogniser, sounds):
    samples = np.zeros((len(sounds), MAX_SAMPLES), np.int16)
    for row, sound in zip(samples, sounds, strict=True):
        row[: len(sound.samples)] = np.rint(sound.samples * 32768)
    count = torch.tensor([max(8000, len(sound.samples)) for sound in sounds])
    tokens = token_count(count)
    rows = recogniser.audio(LogMel()(torch.from_numpy(samples), count), tokens)
    for row, sound, number in zip(rows, sounds, tokens.tolist(), strict=True):
        wanted = recogniser.model.get_audio_features(**extracted(sound), return_dict=True).pooler_output
        assert len(wanted) == number
        torch.testing.assert_close(row[:number], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("context", ["", "Red box, blue cone"])
def test_sequences_are_those_of_the_published_template(tokenizer, context):
    sequences = Sequences(tokenizer)
    words = sentence_ids(SAID[0], SequenceWriter(tokenizer))
    batch = sequences.write([sequences.before(context)], [1], [sequences.answer(words)])
    messages = [
        {"role": "system", "content": context},
        {"role": "user", "content": [{"type": "audio"}]},
        {"role": "assistant", "content": "language English<asr_text>robot go to the red box please"},
    ]
    published = TEMPLATES[TRANSFORMERS].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    texts = [Environment().from_string(each).render(messages=messages) for each in (published, CHAT_TEMPLATE)]
    assert texts[0] == texts[1]
    length, prompt = int(batch["length"][0]), int(batch["prompt_length"][0])
    written = tokenizer.encode(texts[0].removesuffix("\n"), add_special_tokens=False).ids
    assert batch["ids"][0, :length].tolist() == written
    assert tokenizer.decode(written[prompt:-1]) == messages[2]["content"]
    with pytest.raises(ValueError, match=f"at most {LENGTH} tokens"):
        sequences.write([sequences.before()], [LENGTH], [[]])


def test_transcripts_are_those_of_transformers(recogniser, tokenizer, sounds):
    sequences = Sequences(tokenizer)
    found = transcribe(recogniser, sequences, sounds[1:2], "cpu", "red box")
    features, prompt = extracted(sounds[1]), sequences.before("red box")
    tokens = int(token_count(torch.tensor([len(sounds[1].samples)])))
    batch = sequences.write([prompt], [tokens], [[]])
    ids = torch.from_numpy(batch["ids"][:, : batch["length"][0]])
    made = recogniser.model.generate(
        input_ids=ids, **features, max_new_tokens=32, do_sample=False, eos_token_id=sequences.end
    )
    answer = made[0, ids.shape[1] :].tolist()
    assert found[0].text
    assert found[0].text == tokenizer.decode(answer, skip_special_tokens=True).strip()


def test_each_kind_of_sound_without_a_command_is_written_without_words(tokenizer):
    rng = np.random.default_rng(0)
    for kind in NO_SPEECH:
        for split in ("train", "test"):
            assert 0.3 < record_no_speech(rng, split, kind).seconds <= 5
    write, chunk = transcript_writer(tokenizer, seed=3), new_chunk(CLIP_FIELDS, 60)
    for i in range(60):
        write(chunk, i)
    without = chunk["meaning"] == NO_MEANING
    assert 1 <= without.sum() < 20
    assert ((chunk["word_count"] == 0) == without).all()
    sequences = Sequences(tokenizer)
    assert tokenizer.decode(sequences.answer([])[:-1]) == "language None<asr_text>"
    words = chunk["words"][~without][0, : chunk["word_count"][~without][0]]
    assert tokenizer.decode(sequences.answer(words.tolist())[:-1]).startswith("language English<asr_text>")


class NoStream:
    """No workers: all clips are there."""

    def take(self, wait: bool) -> list:
        return []


def test_a_short_run_learns_and_its_engine_transcribes(tokenizer, tmp_path):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng, sequences = np.random.default_rng(2), Sequences(tokenizer)
    learned = [record_command(text, "train", rng)[0] for text in SAID]
    learned += [record_no_speech(rng, "train", kind) for kind in ("noise", "tones")]
    texts = [*map(heard_text, SAID), "", ""]
    chunk = new_chunk(CLIP_FIELDS, len(learned))
    for i, (sound, text) in enumerate(zip(learned, texts, strict=True)):
        write_clip(chunk, i, sound, NO_MEANING, sequences.text(text))
    buffer = ReplayBuffer(len(learned), "cpu", CLIP_FIELDS, HOST_FIELDS)
    buffer.add(chunk)
    clips = Clips(NoStream(), buffer, sequences, rng)
    recogniser = Recogniser(new_model(speech_config(tokenizer, SIZES)))
    optimizer = torch.optim.AdamW(recogniser.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        answer, ctc = both_losses(recogniser.losses, clips, 5)
        optimizer.zero_grad()
        (answer + 0.3 * ctc).backward()
        for group in recogniser.groups():
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        losses.append((answer.item(), ctc.item()))
    assert losses[-1][0] < 0.1 * losses[0][0]
    assert losses[-1][1] < 0.5 * losses[0][1]

    save_speech(tmp_path / "checkpoint", recogniser.model, tokenizer)
    loaded, stored = load_speech(tmp_path / "checkpoint")
    assert stored.to_str() == tokenizer.to_str()
    expected = transcribe(Recogniser(loaded).eval(), sequences, learned, "cpu")
    assert [each.text for each in expected] == texts
    export(tmp_path / "checkpoint", tmp_path / "engine", max_input_len=128, max_kv_cache_capacity=192)
    with Transcriber(tmp_path / "engine") as transcriber:
        for sound, wanted in zip(learned, expected, strict=True):
            found = transcriber.transcribe(sound)
            assert (found.text, found.language) == (wanted.text, wanted.language)
            if wanted.text:
                assert found.confidence == pytest.approx(wanted.confidence, abs=0.01)
            else:
                assert found.language is None


def test_scores_count_words_sentences_and_what_is_made_up():
    assert edits(["go", "to", "a", "red", "box"], ["go", "to", "the", "box"]) == 2
    assert edits([], ["stop", "now"]) == 2
    assert edits(["go", "box"], ["go", "to", "the", "box"]) == 2
    sound = Sound(np.zeros(32000, np.float32), 16000)
    clips = [Clip(sound, "go to the red box"), Clip(sound, "stop")]
    found = [Transcript("Go to the red box.", "English", -0.1), Transcript("top", "English", -0.9)]
    assert score_speech(found, clips) == {
        "word error rate": "16.67% (1 of 6 words)",
        "exact sentences": "1 of 2",
        "obeyed sentences": "1 of 2, 1 of them exact",
    }
    made_up = [Transcript("stop now", "English", -0.2), Transcript("go", "English", -2.0)]
    assert score_no_speech(made_up, [sound, sound]) == "1800.0 per hour (2 in 4 s)"
