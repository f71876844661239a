"""Fixtures that many tests share: a tiny real model with a real tokenizer, and text it can read."""

from __future__ import annotations

import os
from pathlib import Path

# No test may need a network, and asking for one takes a minute to fail. It is read when transformers is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tests run on a CPU, kernels under Triton's interpreter; it is read when Triton is imported. A GPU has
# benchmarks/check_gpu.py.
os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest
import torch

from helpers.models import tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.datastore.store import Datastore
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM

# Two test processes with two threads each wait for one another more than they compute; and a sum is rounded by how
# many threads share it, which tests of equal bytes would see.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

# How long an example takes depends on what else the machine does; a slow one is no failure.
hypothesis.settings.register_profile(
    "knnlm", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("knnlm")


@pytest.fixture(scope="session")
def lm() -> CausalLM:
    """A tiny llama."""
    return CausalLM(tiny("llama"), tiny_tokenizer(), name="tiny-llama")


@pytest.fixture(scope="session")
def store(lm: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """A store of forty short documents, in several segments."""
    return build(documents(40), tmp_path_factory.mktemp("store") / "docs.store", lm=lm, segment_entries=500)


@pytest.fixture(scope="session")
def model_folder(lm: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder, for the command line."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(mixture):
    """A server of what the module calls its mixture."""
    from helpers.server import serving

    with serving(mixture) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    """The real client of OpenAI's API, asking that server."""
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made
