# SPDX-License-Identifier: Apache-2.0
"""The batched forward pass of training against transformers.

Weights and sounds are random.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

from transformers import Qwen3OmniMoeThinkerForConditionalGeneration  # noqa: E402

from training.buffer import ClipBank, audio_marks, say_commands  # noqa: E402
from training.checkpoint import new_thinker, thinker_config  # noqa: E402
from training.data import FIELDS, MEANINGS, SequenceWriter  # noqa: E402
from training.hearing import AudioForward, LogMel, WordHead, ctc_loss, greedy_words, token_count, vary  # noqa: E402
from training.speech import CLIP_CHUNK, CLIP_FIELDS  # noqa: E402
from training.stream import new_chunk  # noqa: E402
from training.thinker import ROPE_DELTA, mrope_positions  # noqa: E402

TOKENIZER = Path(__file__).parents[2] / "models" / "arena" / "tokenizer.json"
COUNTS = (80000, 16000, 33333, 50160, 20159)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def thinker(tokenizer) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    torch.manual_seed(0)
    return new_thinker(thinker_config(tokenizer)).eval()


@pytest.fixture(scope="module")
def clips() -> torch.Tensor:
    rng = np.random.default_rng(0)
    samples = np.zeros((len(COUNTS), 80000), np.int16)
    for row, count in zip(samples, COUNTS, strict=True):
        row[:count] = rng.standard_normal(count) * 3000 * np.sin(np.arange(count) / 9000) ** 2
    return torch.from_numpy(samples)


def test_features_are_whispers(clips):
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    features = LogMel()(clips, torch.tensor(COUNTS))
    for row, samples, count in zip(features, clips, COUNTS, strict=True):
        sound = samples[:count].numpy().astype(np.float32) / 32768
        wanted = extractor(
            sound, sampling_rate=16000, padding=True, truncation=False, return_tensors="pt"
        ).input_features[0]
        torch.testing.assert_close(row[:, : count // 160], wanted[:, : count // 160], atol=1e-4, rtol=0)
        assert not row[:, count // 160 :].any()


@torch.no_grad()
def test_embeddings_are_those_of_transformers(thinker, clips):
    counts = torch.tensor(COUNTS)
    features = LogMel()(clips, counts)
    tower = thinker.model.audio_tower
    embeddings = AudioForward(tower)(features, token_count(counts))
    for row, feature, count, tokens in zip(
        embeddings, features, COUNTS, token_count(counts).tolist(), strict=True
    ):
        frames = count // 160
        wanted = tower(feature[:, :frames], feature_lens=torch.tensor([frames])).last_hidden_state
        assert len(wanted) == tokens
        torch.testing.assert_close(row[:tokens], wanted, atol=1e-5, rtol=1e-4)


def spoken_batch(tokenizer, clips) -> dict[str, torch.Tensor]:
    """One prompt, the first of them to be spoken, and the sounds put in."""
    writer = SequenceWriter(tokenizer)
    chunk = new_chunk(FIELDS, len(COUNTS) + 1)
    for i in range(len(COUNTS) + 1):
        prompt = writer.prompt("go to the red box", np.zeros((8, 2)), "be careful." if i % 2 else "")
        ids = prompt.ids + writer.answer("the way is clear.", True)
        chunk["ids"][i, : len(ids)] = ids
        chunk["image_start"][i] = prompt.image_start
        chunk["command_start"][i], chunk["command_length"][i] = prompt.command_start, prompt.command_length
        chunk["prompt_length"][i], chunk["length"][i] = len(prompt.ids), len(ids)
    batch = {name: torch.from_numpy(value) for name, value in chunk.items()}
    say_commands(batch, clips, torch.tensor(COUNTS), LogMel(), audio_marks(tokenizer.token_to_id))
    return batch


def test_a_sound_takes_the_place_of_the_words(tokenizer, clips):
    batch = spoken_batch(tokenizer, clips)
    writer = SequenceWriter(tokenizer)
    answer = writer.answer("the way is clear.", True)
    start, pad, end = audio_marks(tokenizer.token_to_id)
    for i, count in enumerate(COUNTS):
        prompt = writer.prompt("", np.zeros((8, 2)), "be careful." if i % 2 else "")
        tokens = int(token_count(torch.tensor(count)))
        place = prompt.command_start
        ids = [*prompt.ids[:place], start, *[pad] * tokens, end, *prompt.ids[place:], *answer]
        assert batch["ids"][i, : len(ids)].tolist() == ids
        assert batch["length"][i] == len(ids)
        assert batch["prompt_length"][i] == len(ids) - len(answer)
        assert (batch["audio_start"][i], batch["audio_tokens"][i]) == (place + 1, tokens)
    typed = writer.prompt("go to the red box", np.zeros((8, 2)), "be careful.").ids + answer
    assert batch["ids"][-1, : len(typed)].tolist() == typed


def test_positions_are_those_of_transformers(thinker, tokenizer, clips):
    batch = spoken_batch(tokenizer, clips)
    positions = mrope_positions(batch["image_start"].long(), batch["ids"].shape[1])
    for i, count in enumerate(COUNTS):
        length = int(batch["length"][i])
        wanted, delta = thinker.model.get_rope_index(
            batch["ids"][i : i + 1, :length].long(),
            image_grid_thw=torch.tensor([[1, 14, 20]]),
            attention_mask=torch.ones(1, length),
            audio_seqlens=torch.tensor([count // 160]),
        )
        torch.testing.assert_close(positions[:, i, :length].float(), wanted[:, 0])
        assert delta.item() == ROPE_DELTA


def test_the_bank_gives_clips_of_the_meaning_asked_for():
    bank = ClipBank(200, "cpu")
    rng = np.random.default_rng(0)
    for first in range(0, 4 * len(MEANINGS), CLIP_CHUNK):
        chunk = new_chunk(CLIP_FIELDS, CLIP_CHUNK)
        chunk["meaning"][:] = np.arange(first, first + CLIP_CHUNK) % len(MEANINGS)
        chunk["samples"][:, 0] = chunk["meaning"]
        chunk["count"][:] = 16000 + 160 * chunk["meaning"]
        chunk["word_count"][:] = 1 + chunk["meaning"]
        bank.add(chunk)
        assert bank.ready == (first + CLIP_CHUNK >= len(MEANINGS))
    asked = rng.integers(len(MEANINGS), size=100)
    clips, lengths = bank.sample(rng, asked)
    assert clips["meaning"].tolist() == clips["samples"][:, 0].tolist() == asked.tolist()
    assert lengths["word_count"].tolist() == (1 + asked).tolist()
    assert lengths["count"].tolist() == clips["count"].tolist()


def test_varied_sounds_keep_their_middle():
    count = torch.tensor([80000, 40000, 16000] * 30)
    time = torch.arange(80000)
    tone = (10000 * torch.sin(2 * torch.pi * 500 * time / 16000)).to(torch.int16)
    samples = torch.where(time < count[:, None], tone, 0).to(torch.int16)
    varied, counts = vary(samples, count, np.random.default_rng(0))
    assert varied.dtype == torch.int16
    assert (counts >= (count - 4800) / 1.07 - 1).all()
    assert (counts <= 80000).all()
    hertz = []
    for row, n in zip(varied, counts.tolist(), strict=True):
        assert not row[n:].any()
        spectrum = torch.fft.rfft(row[:n].float(), 160000).abs()
        hertz.append(spectrum.argmax().item() / 10)
    assert sum(abs(h - 500) < 0.2 for h in hertz) > 30
    assert 465 - 1 <= min(hertz) < 480
    assert 520 < max(hertz) <= 535 + 1


def test_two_sounds_are_learned_by_heart(thinker, clips):
    """The loss reaches what hears, and goes down until every word is right."""
    torch.manual_seed(0)
    audio, head = AudioForward(thinker.model.audio_tower), WordHead(256, 20)
    counts = torch.tensor([16000, 12000])
    features, tokens = LogMel()(clips[[0, 2], 20000:36000], counts), token_count(counts)
    words, lengths = torch.tensor([[3, 5, 7], [9, 1, 0]]), torch.tensor([3, 2])
    parameters = dict([*audio.named_parameters(), *head.named_parameters()])
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    heard = []
    for step in range(100):
        scores = head(audio(features, tokens))
        heard = greedy_words(scores.detach(), tokens)
        if heard == [[3, 5, 7], [9, 1]]:
            break
        loss = ctc_loss(scores, tokens, words, lengths)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            moved = {name for name, parameter in parameters.items() if parameter.grad.abs().max() > 0}
            assert moved >= {name for name in parameters if "k_proj.bias" not in name}
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
    assert heard == [[3, 5, 7], [9, 1]]
