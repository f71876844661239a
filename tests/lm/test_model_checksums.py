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
from knnlm.datastore.integrity import summed
from knnlm.errors import DatastoreCorrupt, KnnlmError, ModelError
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.maintenance.repair import repair
from knnlm.maintenance.verify import verify
from knnlm.memories.decoder import load_card, set_lambda
from knnlm.mixture.mixture import Mixture
from knnlm.training.adapt import load_adaptation
from knnlm.training.decoder import DecoderConfig, train_decoder
from knnlm.training.initial_model import open_initial_model

FIXED = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}
LIST, CARD = "knnlm.sha256", "decoder.json"


@pytest.fixture(scope="module")
def adapted(lm, model_folder, tmp_path_factory):
    """A memory with a decoder in it, as adapt leaves it, but hardly trained."""
    path = tmp_path_factory.mktemp("vouched") / "memory"
    path.mkdir()
    tokens = [lm.encode(document.text) for document in documents(3)]
    initial = open_initial_model(str(model_folder), like=lm)
    train_decoder(tokens, initial, path / "decoder", DecoderConfig(epochs=1), device="cpu")
    reader = CausalLM.open(str(path / "decoder"), device="cpu", dtype="float32")
    build(documents(3), path, lm=reader).close()
    (path / "adapted.json").write_text(json.dumps(summed({"model": "tiny", "base": 12.5})))
    return path


@pytest.fixture
def memory(adapted, tmp_path):
    shutil.copytree(adapted, tmp_path / "memory")
    return tmp_path / "memory"


def listed(decoder):
    return dict(reversed(line.split("  ", 1)) for line in (decoder / LIST).read_text().splitlines())


def test_all_files_but_the_card_are_listed_with_their_sha256(memory):
    decoder = memory / "decoder"
    files = {file.name for file in decoder.iterdir()} - {LIST, CARD}
    assert {"model.safetensors", "config.json", "tokenizer.json", "losses.jsonl"} <= files
    assert listed(decoder) == {name: hashlib.sha256((decoder / name).read_bytes()).hexdigest() for name in files}
    found = verify(memory, deep=True)
    assert (found.problems, found.notes) == ((), ())


def test_a_flipped_bit_in_any_file_of_a_decoder_is_named_when_it_is_loaded_and_by_verify(memory, lm):
    decoder = memory / "decoder"
    for name in sorted({*listed(decoder), LIST}):
        flip(decoder / name, 20)
        with pytest.raises(ModelError, match=r"checksum mismatch \(SHA-256\)|: missing") as caught:
            CausalLM.open(str(decoder))
        assert name == LIST or str(decoder / name) in str(caught.value)
        assert "\n" not in str(caught.value)
        found = verify(memory, deep=True)
        assert name == LIST or named(found) == {f"decoder/{name}"}
        assert not found.sound
        flip(decoder / name, 20)
    (decoder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: missing"):
        Mixture.open(decoder, lm)
    with pytest.raises(DatastoreCorrupt, match=r"cannot be repaired: decoder/model\.safetensors: missing"):
        repair(memory)


@settings(max_examples=60, **FIXED)
@given(data=st.data())
def test_a_flipped_bit_in_a_card_is_an_error_or_changes_nothing(data, adapted, tmp_path):
    card, sound = tmp_path / CARD, load_card(adapted / "decoder")
    shutil.copy(adapted / "decoder" / CARD, card)
    size = card.stat().st_size
    changed = bytearray(card.read_bytes())
    changed[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    card.write_bytes(changed)
    with suppress(KnnlmError):
        assert load_card(tmp_path) == sound


def test_a_card_that_is_tuned_is_vouched_for_anew(memory, lm):
    facts = {"model": "m", "text": "t", "tokens": 5, "base_perplexity": 3.0, "perplexity": 2.0}
    set_lambda(memory / "decoder", 0.25, facts)
    assert load_card(memory / "decoder").lmbda == 0.25
    assert verify(memory, deep=True).sound
    Mixture.open(memory / "decoder", lm)
    card = memory / "decoder" / CARD
    card.write_text(card.read_text().replace('"lambda": 0.25', '"lambda": 0.35'))
    with pytest.raises(DatastoreCorrupt, match=r"decoder\.json is not as it was written"):
        load_card(memory / "decoder")
    assert named(verify(memory)) == {f"decoder/{CARD}"}


def test_a_decoder_from_before_is_loaded_and_verify_says_that_it_cannot_be_compared(memory):
    decoder = memory / "decoder"
    (decoder / LIST).unlink()
    facts = json.loads((decoder / CARD).read_text())
    del facts["sha256"]
    (decoder / CARD).write_text(json.dumps(facts))
    CausalLM.open(str(decoder))
    found = verify(memory, deep=True)
    assert found.sound
    assert any("decoder has no knnlm.sha256" in note for note in found.notes)


@pytest.mark.parametrize("text", ["", "nonsense\n", "\xff", "0" * 64 + "  ../../etc/passwd\n", "x" * (1 << 21)])
def test_a_list_that_is_none_is_an_error_and_leads_nowhere(memory, text):
    (memory / "decoder" / LIST).write_text(text, encoding="latin1")
    with pytest.raises(ModelError, match=r"knnlm\.sha256: checksum mismatch"):
        CausalLM.open(str(memory / "decoder"))
    assert named(verify(memory, deep=True)) == {f"decoder/{LIST}"}


def test_the_figures_of_an_adaptation_are_vouched_for(memory):
    file = memory / "adapted.json"
    file.write_text(file.read_text().replace("12.5", "13.5"))
    assert named(verify(memory)) == {"adapted.json"}
    done = repair(memory)
    assert (done.kept_in / "adapted.json").exists()
    assert load_adaptation(memory) is None
