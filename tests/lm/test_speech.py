"""Models that read sounds: keys, perplexity and transcripts against plain passes of transformers, sound by sound."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from helpers import oracle
from helpers.cli import failure, knnlm
from helpers.models import SAMPLING_RATE, TEXT, tiny, whisper_extractor, whisper_tokenizer
from knnlm.corpus import Document
from knnlm.errors import CorpusError, ParameterError
from knnlm.generation.seq2seq import KnnForSeq2SeqLM
from knnlm.ingest.build import build
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.lm.speech import SpeechLM, open_lm
from knnlm.lm.windows import WindowShape
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions

FFN = "model.decoder.layers.2.fc1"
START = [1, 2, 4, 5]  # start of transcript, English, transcribe, no timestamps
SETTINGS = {"k": 4, "knn_temperature": 3.0, "lmbda": 0.6}

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")


def samples(number: int) -> np.ndarray:
    """A sound of its own for each number, less than a second."""
    times = np.arange(1500 + 200 * number) / SAMPLING_RATE
    return (0.5 * np.sin(2 * np.pi * (90 + 40 * number) * times)).astype(np.float32)


def write_wav(path: Path, sound: np.ndarray, *, rate: int = SAMPLING_RATE, size: int = 2, channels: int = 1) -> str:
    """Write a sound of -1 to 1; other channels are silent."""
    kinds = {1: np.uint8, 2: np.int16, 4: np.int32}
    scaled = np.round(sound.astype(np.float64) * ((1 << (8 * size - 1)) - 1)) + (128 if size == 1 else 0)
    frames = np.full((len(sound), channels), 128 if size == 1 else 0)
    frames[:, 0] = scaled
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, size, rate, 0, "NONE", ""))
        file.writeframes(frames.astype(kinds[size]).tobytes())
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sounds")


@pytest.fixture(scope="module")
def lm() -> SpeechLM:
    return SpeechLM(tiny("whisper"), whisper_tokenizer(), whisper_extractor(), name="whisper", tgt_lang="en")


@pytest.fixture(scope="module")
def documents(folder: Path) -> list[Document]:
    words, made = TEXT.split(), []
    for number in range(8):
        path = write_wav(folder / f"{number}.wav", samples(number))
        text = " ".join(words[4 * number : 4 * number + 2 + number % 3])
        made.append(Document(f"d{number}", f"calls.tsv:{number + 1}", text, source_text=path))
    return made


@torch.no_grad()
def plain(lm: SpeechLM, path: str, decoder_input: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The (T, D) keys and (T, V) probabilities of one sound, read by NumPy, with a plain hook."""
    data = np.frombuffer(Path(path).read_bytes()[44:], np.int16).astype(np.float32) / 32768
    features = whisper_extractor()([data], sampling_rate=SAMPLING_RATE, return_tensors="pt")["input_features"]
    seen: list[Any] = []

    def hook(_: nn.Module, args: Any) -> None:
        seen.append(args[0])

    handle = lm.model.get_submodule(FFN).register_forward_pre_hook(hook)
    logits = lm.model(input_features=features, decoder_input_ids=torch.tensor([decoder_input])).logits[0]
    handle.remove()
    return seen[0][0].numpy(), np.array([oracle.softmax(row.double().numpy()) for row in logits])


def targets(lm: SpeechLM, document: Document) -> list[int]:
    return [*lm.tokenizer(document.text, add_special_tokens=False)["input_ids"], 0]


def test_batches_of_sounds_agree_with_one_pass_for_each(lm: SpeechLM, documents: list[Document]) -> None:
    assert [*lm.prefix_tokens, lm.start_token] == START
    assert lm.max_length == 128 - 3
    found = list(lm.read(lm.encode_documents(documents), WindowShape(64, 32), batch_tokens=100))
    assert len(found) > 1
    order = torch.cat([batch.rows for batch in found]).argsort()
    keys = torch.cat([batch.keys for batch in found])[order]
    probs = torch.cat([batch.logits for batch in found if batch.logits is not None])[order].softmax(-1)
    row = 0
    for document in documents:
        wanted = targets(lm, document)
        assert document.source_text is not None
        right_keys, right_probs = plain(lm, document.source_text, [*START, *wanted[:-1]])
        here = slice(row, row + len(wanted))
        np.testing.assert_allclose(keys[here], right_keys[3:], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(probs[here], right_probs[3:], rtol=1e-4, atol=1e-6)
        row += len(wanted)
    assert row == len(keys)


def test_perplexity_and_transcripts_are_those_of_brute_force(
    lm: SpeechLM, documents: list[Document], tmp_path: Path
) -> None:
    stored, held_out = documents[:6], documents[6:]
    build(stored, tmp_path / "s", lm=lm, key_format="float32")
    mixture = Mixture.open(tmp_path / "s", lm, **SETTINGS)
    with pytest.raises(ParameterError, match="are sounds, but --subset compares the words of sources"):
        Mixture.open(tmp_path / "s", lm, options=MixtureOptions(subset=2))
    keys, values = [], []
    for document in stored:
        wanted = targets(lm, document)
        keys.append(plain(lm, str(document.source_text), [*START, *wanted[:-1]])[0][3:])
        values += wanted
    every = np.concatenate(keys)

    def mixed(key: np.ndarray, p_lm: np.ndarray) -> np.ndarray:
        votes = {"k": 4, "knn_temperature": 3.0}
        p_knn = oracle.knn_distribution(key, every, np.array(values), len(p_lm), **votes)
        return oracle.mix(p_lm, p_knn, 0.6)

    log_p = []
    for document in held_out:
        wanted = targets(lm, document)
        read = plain(lm, str(document.source_text), [*START, *wanted[:-1]])
        positions = zip(read[0][3:], read[1][3:], wanted, strict=True)
        log_p += [math.log(mixed(key, p_lm)[token]) for key, p_lm, token in positions]
    assert mixture.evaluate(held_out).perplexity == pytest.approx(math.exp(-np.mean(log_p)), rel=1e-3)

    model = KnnForSeq2SeqLM(mixture)
    paths = [str(document.source_text) for document in documents[4:]]
    together = model.generate(**lm.pad_sources(lm.encode_sources(paths)), max_new_tokens=6)
    for number, path in enumerate(paths):
        written = list(START)
        for _ in range(6):
            key, p_lm = (each[-1] for each in plain(lm, path, written))
            written.append(int(mixed(key, p_lm).argmax()))
            if written[-1] == 0:
                break
        assert together[number].tolist()[: len(written)] == written
    assert mixture.translate(paths[:1], max_new_tokens=6, num_beams=2)
    assert mixture.translate(paths[:1], max_new_tokens=6, use_memory=False)
    model.save_pretrained(tmp_path / "saved")
    opened = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    again = opened.generate(**lm.pad_sources(lm.encode_sources(paths)), max_new_tokens=6)
    assert again.tolist() == together.tolist()


def test_second_model_reads_the_sounds_too(lm: SpeechLM, documents: list[Document], tmp_path: Path) -> None:
    build(documents[:4], tmp_path / "s", lm=lm)
    for part in (tiny("whisper", seed=1), whisper_tokenizer(), whisper_extractor()):
        part.save_pretrained(tmp_path / "decoder")
    mixture = Mixture.open(tmp_path / "s", lm, memories=f"decoder={tmp_path / 'decoder'}:0.6")
    decoder = mixture.readers.models[1]
    assert isinstance(decoder, SpeechLM)
    model = KnnForSeq2SeqLM(mixture)
    paths = [str(document.source_text) for document in documents[3:6]]
    inputs = lm.pad_sources(lm.encode_sources(paths))
    together = model.generate(**inputs, max_new_tokens=5)
    for number, path in enumerate(paths):
        written = list(START)
        for _ in range(5):
            p_lm, p_decoder = (plain(each, path, written)[1][-1] for each in (lm, decoder))
            written.append(int((0.4 * p_lm + 0.6 * p_decoder).argmax()))
            if written[-1] == 0:
                break
        assert together[number].tolist()[: len(written)] == written
    without = model.generate(**inputs, max_new_tokens=5, use_cache=False)
    assert without.tolist() == together.tolist()
    # The features are of the precision of the model, which may be another than that of the second one.
    half = SpeechLM(tiny("whisper").bfloat16(), whisper_tokenizer(), whisper_extractor(), name="half", tgt_lang="en")
    mixture = Mixture.open(tmp_path / "s", half, memories=f"decoder={tmp_path / 'decoder'}:1", use_tuned=False)
    features, ids = half.pad_sources(half.encode_sources(paths[:1])), torch.tensor([START])
    found = KnnForSeq2SeqLM(mixture)(**features, decoder_input_ids=ids).logits[0, -1].exp()
    np.testing.assert_allclose(found.detach(), plain(decoder, paths[0], START)[1][-1], rtol=0.05, atol=1e-3)


@pytest.mark.parametrize(("size", "channels"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_samples_of_every_width_are_read(lm: SpeechLM, tmp_path: Path, size: int, channels: int) -> None:
    sound = samples(2)
    path = write_wav(tmp_path / "a.wav", sound, size=size, channels=channels)
    np.testing.assert_allclose(lm._read(path), sound / channels, atol=0.02 if size == 1 else 1e-4)


def test_wrong_sounds_and_languages_are_errors_in_words(lm: SpeechLM, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nowhere.wav: cannot be read as a WAV file \(No such file.*ffmpeg"):
        lm.encode_sources([str(tmp_path / "nowhere.wav")])
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(CorpusError, match=r"text.wav: cannot be read as a WAV file.*ffmpeg -i"):
        lm.encode_sources([str(tmp_path / "text.wav")])
    path = write_wav(tmp_path / "fast.wav", samples(1), rate=44_100)
    with pytest.raises(CorpusError, match=r"44,100 samples a second.*ffmpeg -i .* -ar 3840"):
        lm.encode_sources([path])
    model, tokenizer = lm.model, whisper_tokenizer()
    with pytest.raises(ParameterError, match="finds the language of a sound by itself"):
        SpeechLM(model, tokenizer, whisper_extractor(), src_lang="en")
    with pytest.raises(ParameterError, match="has no language 'klingon'"):
        SpeechLM(model, tokenizer, whisper_extractor(), tgt_lang="klingon")
    plain_start = SpeechLM(model, whisper_tokenizer(), whisper_extractor())
    assert plain_start.start_tokens == (1, 5)


def test_commands_read_sounds(documents: list[Document], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny("whisper").save_pretrained(tmp_path / "whisper")
    whisper_tokenizer().save_pretrained(tmp_path / "whisper")
    whisper_extractor().save_pretrained(tmp_path / "whisper")
    lm = open_lm(str(tmp_path / "whisper"), tgt_lang="en")
    assert isinstance(lm, SpeechLM)
    assert isinstance(lm, Seq2SeqLM)
    assert lm.start_tokens == tuple(START)
    calls, store = tmp_path / "calls.tsv", tmp_path / "calls.store"
    calls.write_text("".join(f"{each.source_text}\t{each.text}\n" for each in documents))
    arguments = ["--out", store, "--model", tmp_path / "whisper", "--tgt-lang", "en"]
    assert knnlm(capfd, "build", calls, *arguments)[0] == 0
    code, out, _ = knnlm(capfd, "eval", store, calls, "--json")
    assert code == 0
    assert json.loads(out)["documents"] == len(documents)
    sound = documents[3].source_text
    code, out, _ = knnlm(capfd, "translate", store, sound, "--k", 1, "--lambda", 0.99, "--max-new-tokens", 20)
    assert code == 0
    assert out.strip() == documents[3].text
    code, out, _ = knnlm(capfd, "explain", store, documents[3].text, "--source", sound, "--json")
    assert code == 0
    assert json.loads(out)["tokens"][0]["neighbours"][0]["source_text"].endswith(".wav")
    calls.write_text("missing.wav\tA text\n")
    assert "missing.wav: cannot be read as a WAV file" in failure(capfd, "eval", store, calls)
