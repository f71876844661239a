"""The measurement: a small one on a tiny model gives constants that a plan accepts."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.cli import knnlm
from knnlm.plan import measure as module
from knnlm.plan.constants import packaged_constants, parse_constants
from knnlm.plan.measure import Effort, InstantModel, build_instantly, measure, non_negative_fit, synthetic_keys
from knnlm.plan.measure_gpu import GpuEffort, measure_gpu
from knnlm.plan.model import describe_model, shape_of
from knnlm.plan.system import measure_disk, page_fault_seconds

SMALL = Effort(
    keys=21_000,
    stored=2048,
    forward=128,
    code_keys=4000,
    segments=16,
    singles=8,
    batches=(1, 4, 16),
    repeats=1,
    disk_bytes=1 << 22,
)


@pytest.fixture(scope="module")
def constants(lm, tmp_path_factory):
    return measure(lm, tmp_path_factory.mktemp("measure"), effort=SMALL, clock=time.process_time)


def test_measurement_is_complete_and_can_be_read_again(constants, lm):
    again = parse_constants(constants.as_json(), "c.json")
    assert again == constants
    assert constants.models[lm.name]["cpu"] > 0
    assert constants.cpu.threads == torch.get_num_threads()
    assert constants.machine["processor"]
    assert constants.gpu is None
    for name in ("flop", "tokenise", "store_plain", "nearest", "product", "fill", "rerank", "base_bytes"):
        assert getattr(constants.cpu, name) > 0, name
    assert len(constants.latencies) == 8
    assert float(np.median(constants.latencies)) == pytest.approx(1.0, abs=0.01)


def test_machine_without_faiss_gets_the_constants_of_searches_from_the_package(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "faiss" else 1)
    found = measure(lm, tmp_path, effort=SMALL)
    packaged = packaged_constants()
    assert found.cpu.scan == packaged.cpu.scan
    assert found.latencies == packaged.latencies
    assert found.cpu.tokenise != packaged.cpu.tokenise
    assert parse_constants(found.as_json(), "c.json") == found


def test_keys_of_the_instant_model_are_stored_as_they_are(lm, tmp_path):
    keys = synthetic_keys(2500, 32, seed=0)
    store = build_instantly(lm, keys, tmp_path / "a.store", document_tokens=300, segment_entries=700)
    assert store.entry_count == 2500
    assert store.catalog.document_count() == 9
    assert torch.equal(store.take(torch.arange(2500)).half(), keys)
    store.close()


def test_instant_model_yields_its_first_keys_for_the_sample_of_a_build(lm):
    instant = InstantModel(lm, synthetic_keys(600, 32, seed=0), 300)
    sample = next(instant.read([[0] * 256], instant.window(), logits=False)).keys
    first = next(instant.read([[0] * 300], instant.window(), logits=False)).keys
    assert torch.equal(sample, first[:256])


def test_fit_finds_factors_that_are_not_negative():
    terms = np.array([[1.0, 1.0, 40.0], [1.0, 16.0, 300.0], [1.0, 256.0, 500.0], [1.0, 4096.0, 500.0]])
    factors = np.array([2.0, 0.5, 0.25])
    assert non_negative_fit(terms, terms @ factors) == pytest.approx(factors.tolist())
    assert non_negative_fit(terms, terms @ np.array([2.0, 0.0, 0.25])) == pytest.approx([2.0, 0.0, 0.25], abs=1e-9)
    assert min(non_negative_fit(terms, np.array([5.0, 4.0, 3.0, 2.0]))) >= 0


def test_memory_of_the_process_is_seen():
    """In a new process: the memory of this one may be reclaimed meanwhile."""
    code = """
        import numpy as np
        from knnlm.plan.system import peak_memory, reset_peak, resident_memory
        before = resident_memory()
        reset_peak()
        block = np.ones(40_000_000, np.uint8)
        assert peak_memory() >= before + 20e6, (before, peak_memory())
        del block
        reset_peak()
        assert peak_memory() < before + 20e6, (before, peak_memory())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_disk_takes_some_time(tmp_path):
    assert all(0 < seconds < 1 for seconds in measure_disk(tmp_path, 1 << 22))
    assert 0 <= page_fault_seconds(tmp_path, 1 << 22) < 1e-6
    assert not list(tmp_path.iterdir())


def test_shape_of_a_configuration_is_that_of_the_model(lm, model_folder):
    described = describe_model(str(model_folder))
    loaded = shape_of(lm.model, str(model_folder))
    assert described == loaded
    assert described.width == lm.width
    assert described.window == lm.window()
    assert described.parameters == sum(each.numel() for each in lm.model.parameters())


def test_kernels_of_the_gpu_are_measured(lm, tmp_path):
    effort = GpuEffort(
        windows=2, text_copies=1, segments=2, segment_keys=256, few_keys=128, keys=512, queries=16, repeats=1, singles=2
    )
    figures, gpu = measure_gpu(lm, tmp_path, effort=effort)
    assert figures["cuda"] >= figures["cuda-compiled"] > 0
    assert gpu.tokenise > 0
    assert gpu.store > 0
    assert gpu.store_one > 0
    assert gpu.start > 0
    assert gpu.launch > 0
    assert min(gpu.half_read, gpu.half, gpu.int8_read, gpu.int8, gpu.search, gpu.query) >= 0


def test_command_measures_and_plans(capfd, constants, model_folder, tmp_path, monkeypatch):
    def measured(lm, folder, *, progress):
        assert folder.is_dir()
        return replace(constants, models={lm.name: constants.models["tiny-llama"]})

    monkeypatch.setattr(module, "measure", measured)
    file = tmp_path / "c.json"
    options = ["--measure", "--constants", file, "--model", model_folder, "--tokens", "1e6", "--json"]
    code, out, err = knnlm(capfd, "plan", *options)
    assert code == 0
    assert str(file) in err
    assert json.loads(out)["constants"]["origin"] == str(file)
    assert "measured with this model" in out
