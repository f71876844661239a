"""The files of a student are compared with their checksums when it is loaded, and by verify."""

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
from knnlm.training.decoder import train_decoder
from knnlm.training.student import open_student

FIXED = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}
LIST, CARD = "knnlm.sha256", "decoder.json"


@pytest.fixture(scope="module")
def adapted(lm, model_folder, tmp_path_factory):
    """A memory with a student in it, as adapt leaves it, but hardly trained."""
    path = tmp_path_factory.mktemp("vouched") / "memory"
    path.mkdir()
    tokens = [lm.encode(document.text) for document in documents(3)]
    train_decoder(tokens, open_student(str(model_folder), like=lm), path / "student", epochs=1, device="cpu")
    reader = CausalLM.open(str(path / "student"), device="cpu", dtype="float32")
    build(documents(3), path, lm=reader).close()
    (path / "adapted.json").write_text(json.dumps(summed({"model": "tiny", "base": 12.5})))
    return path


@pytest.fixture
def memory(adapted, tmp_path):
    shutil.copytree(adapted, tmp_path / "memory")
    return tmp_path / "memory"


def listed(student):
    return dict(reversed(line.split("  ", 1)) for line in (student / LIST).read_text().splitlines())


def test_all_files_but_the_card_are_listed_with_their_sha256(memory):
    student = memory / "student"
    files = {file.name for file in student.iterdir()} - {LIST, CARD}
    assert {"model.safetensors", "config.json", "tokenizer.json", "losses.jsonl"} <= files
    assert listed(student) == {name: hashlib.sha256((student / name).read_bytes()).hexdigest() for name in files}
    found = verify(memory, deep=True)
    assert (found.problems, found.notes) == ((), ())


def test_a_flipped_bit_in_any_file_of_a_student_is_named_when_it_is_loaded_and_by_verify(memory, lm):
    student = memory / "student"
    for name in sorted({*listed(student), LIST}):
        flip(student / name, 20)
        with pytest.raises(ModelError, match=r"checksum mismatch \(SHA-256\)|: missing") as caught:
            CausalLM.open(str(student))
        assert name == LIST or str(student / name) in str(caught.value)
        assert "\n" not in str(caught.value)
        found = verify(memory, deep=True)
        assert name == LIST or named(found) == {f"student/{name}"}
        assert not found.sound
        flip(student / name, 20)
    (student / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: missing"):
        Mixture.open(student, lm)
    with pytest.raises(DatastoreCorrupt, match=r"cannot be repaired: student/model\.safetensors: missing"):
        repair(memory)


@settings(max_examples=60, **FIXED)
@given(data=st.data())
def test_a_flipped_bit_in_a_card_is_an_error_or_changes_nothing(data, adapted, tmp_path):
    card, sound = tmp_path / CARD, load_card(adapted / "student")
    shutil.copy(adapted / "student" / CARD, card)
    size = card.stat().st_size
    changed = bytearray(card.read_bytes())
    changed[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    card.write_bytes(changed)
    with suppress(KnnlmError):
        assert load_card(tmp_path) == sound


def test_a_card_that_is_tuned_is_vouched_for_anew(memory, lm):
    facts = {"model": "m", "text": "t", "tokens": 5, "base_perplexity": 3.0, "perplexity": 2.0}
    set_lambda(memory / "student", 0.25, facts)
    assert load_card(memory / "student").lmbda == 0.25
    assert verify(memory, deep=True).sound
    Mixture.open(memory / "student", lm)
    card = memory / "student" / CARD
    card.write_text(card.read_text().replace('"lambda": 0.25', '"lambda": 0.35'))
    with pytest.raises(DatastoreCorrupt, match=r"decoder\.json is not as it was written"):
        load_card(memory / "student")
    assert named(verify(memory)) == {f"student/{CARD}"}


def test_a_student_from_before_is_loaded_and_verify_says_that_it_cannot_be_compared(memory):
    student = memory / "student"
    (student / LIST).unlink()
    facts = json.loads((student / CARD).read_text())
    del facts["sha256"]
    (student / CARD).write_text(json.dumps(facts))
    CausalLM.open(str(student))
    found = verify(memory, deep=True)
    assert found.sound
    assert any("student has no knnlm.sha256" in note for note in found.notes)


@pytest.mark.parametrize("text", ["", "nonsense\n", "\xff", "0" * 64 + "  ../../etc/passwd\n", "x" * (1 << 21)])
def test_a_list_that_is_none_is_an_error_and_leads_nowhere(memory, text):
    (memory / "student" / LIST).write_text(text, encoding="latin1")
    with pytest.raises(ModelError, match=r"knnlm\.sha256: checksum mismatch"):
        CausalLM.open(str(memory / "student"))
    assert named(verify(memory, deep=True)) == {f"student/{LIST}"}


def test_the_figures_of_an_adaptation_are_vouched_for(memory):
    file = memory / "adapted.json"
    file.write_text(file.read_text().replace("12.5", "13.5"))
    assert named(verify(memory)) == {"adapted.json"}
    done = repair(memory)
    assert (done.kept_in / "adapted.json").exists()
    assert load_adaptation(memory) is None
