"""The files of a decoder are compared with their checksums when it is loaded, and by verify."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.damage import flip, named
from helpers.stores import documents
from knnlm.datastore.integrity import with_checksum
from knnlm.errors import DatastoreCorrupt, KnnlmError, ModelError
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify
from knnlm.memories.decoder import load_card, set_lambda
from knnlm.mixture.mixture import Mixture
from knnlm.training.adapt import load_adaptation
from knnlm.training.decoder import train_decoder
from knnlm.training.decoder_trainer import DecoderConfig
from knnlm.training.initial_model import open_initial_model

FIXED = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}
LIST, CARD = "knnlm.sha256", "decoder.json"


@pytest.fixture(scope="module")
def adapted(lm, model_folder, tmp_path_factory):
    """A store with a decoder in it, as adapt leaves it, but hardly trained."""
    path = tmp_path_factory.mktemp("adapted") / "adapted.store"
    path.mkdir()
    tokens = [lm.encode(document.text) for document in documents(3)]
    initial = open_initial_model(str(model_folder), like=lm)
    train_decoder(tokens, initial, path / "decoder", DecoderConfig(epochs=1), device="cpu")
    reader = CausalLM.open(str(path / "decoder"), device="cpu", dtype="float32")
    build(documents(3), path, lm=reader).close()
    (path / "adapted.json").write_text(json.dumps(with_checksum({"model": "tiny", "base": 12.5})))
    return path


@pytest.fixture
def store(adapted, tmp_path):
    shutil.copytree(adapted, tmp_path / "adapted.store")
    return tmp_path / "adapted.store"


def listed(decoder):
    return dict(reversed(line.split("  ", 1)) for line in (decoder / LIST).read_text().splitlines())


def test_all_files_except_the_card_have_a_checksum(store):
    decoder = store / "decoder"
    files = {file.name for file in decoder.iterdir()} - {LIST, CARD}
    assert {"model.safetensors", "config.json", "tokenizer.json", "losses.jsonl"} <= files
    assert listed(decoder) == {name: hashlib.sha256((decoder / name).read_bytes()).hexdigest() for name in files}
    found = verify(store, deep=True)
    assert (found.problems, found.notes) == ((), ())


def test_flipped_bit_in_any_file_of_a_decoder_is_named_when_it_is_loaded_and_by_verify(store, lm):
    decoder = store / "decoder"
    for name in sorted({*listed(decoder), LIST}):
        flip(decoder / name, 20)
        with pytest.raises(ModelError, match=r"checksum mismatch \(SHA-256\)|: missing") as caught:
            CausalLM.open(str(decoder))
        assert name == LIST or str(decoder / name) in str(caught.value)
        assert "\n" not in str(caught.value)
        found = verify(store, deep=True)
        assert name == LIST or named(found) == {f"decoder/{name}"}
        assert not found.sound
        flip(decoder / name, 20)
    (decoder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: missing"):
        Mixture.open(decoder, lm)
    with pytest.raises(DatastoreCorrupt, match=r"cannot be repaired: decoder/model\.safetensors: missing"):
        repair(store)


@settings(max_examples=60, **FIXED)
@given(data=st.data())
def test_flipped_bit_in_a_card_is_an_error_or_changes_nothing(data, adapted, tmp_path):
    card, sound = tmp_path / CARD, load_card(adapted / "decoder")
    shutil.copy(adapted / "decoder" / CARD, card)
    size = card.stat().st_size
    changed = bytearray(card.read_bytes())
    changed[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    card.write_bytes(changed)
    with suppress(KnnlmError):
        assert load_card(tmp_path) == sound


def test_tuned_card_has_a_new_checksum(store, lm):
    metadata = {"model": "m", "text": "t", "tokens": 5, "base_perplexity": 3.0, "perplexity": 2.0}
    set_lambda(store / "decoder", 0.25, metadata)
    assert load_card(store / "decoder").lmbda == 0.25
    assert verify(store, deep=True).sound
    Mixture.open(store / "decoder", lm)
    card = store / "decoder" / CARD
    card.write_text(card.read_text().replace('"lambda": 0.25', '"lambda": 0.35'))
    with pytest.raises(DatastoreCorrupt, match=r"decoder\.json: checksum mismatch"):
        load_card(store / "decoder")
    assert named(verify(store)) == {f"decoder/{CARD}"}


def test_decoder_without_checksums_is_loaded_and_verify_notes_it(store):
    decoder = store / "decoder"
    (decoder / LIST).unlink()
    metadata = json.loads((decoder / CARD).read_text())
    del metadata["sha256"]
    (decoder / CARD).write_text(json.dumps(metadata))
    CausalLM.open(str(decoder))
    found = verify(store, deep=True)
    assert found.sound
    assert any("decoder has no knnlm.sha256" in note for note in found.notes)


@pytest.mark.parametrize("text", ["", "nonsense\n", "\xff", "0" * 64 + "  ../../etc/passwd\n", "x" * (1 << 21)])
def test_invalid_list_of_checksums_is_an_error(store, text):
    (store / "decoder" / LIST).write_text(text, encoding="latin1")
    with pytest.raises(ModelError, match=r"knnlm\.sha256: checksum mismatch"):
        CausalLM.open(str(store / "decoder"))
    assert named(verify(store, deep=True)) == {f"decoder/{LIST}"}


def test_figures_of_an_adaptation_have_a_checksum(store):
    file = store / "adapted.json"
    file.write_text(file.read_text().replace("12.5", "13.5"))
    assert named(verify(store)) == {"adapted.json"}
    done = repair(store)
    assert (done.kept_in / "adapted.json").exists()
    assert load_adaptation(store) is None
