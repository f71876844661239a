"""Passes of models that are replayed: a stand-in for CUDA graphs runs the captured pass on its own tensors.

benchmarks/check_gpu.py does the same with CUDA graphs on a GPU.
"""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from weakref import WeakKeyDictionary, ref

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from helpers.adapters import random_adapters
from helpers.graphs import Replays
from helpers.models import FAMILIES, tiny, tiny_tokenizer
from helpers.stores import documents
from knnlm.errors import KnnlmWarning
from knnlm.generation import model_graph
from knnlm.generation.causal import KnnForCausalLM
from knnlm.generation.draft import Drafter, StepTimes
from knnlm.generation.model_graph import MAX_GRAPHS, ModelPass, accepted_arguments, model_graphs, read_with_graph
from knnlm.ingest.build import build
from knnlm.lm.causal import CausalLM
from knnlm.lm.cuda_graph import WARM_RUNS, CapturedGraph
from knnlm.lm.layers import layer_list
from knnlm.lm.shared import TopLM
from knnlm.mixture.mixture import Mixture
from knnlm.server.engine.batching import BatchedCache, Prompt, read_prompt

PROMPTS = [[1, 5, 9, 7, 30, 11], [1, 6, 10]]
LENGTH = 12  # tokens that are generated
MODELS = 2  # of a mixture with a decoder
SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": LENGTH}
IDS = torch.tensor([PROMPTS[0]])
PADDED = torch.tensor([PROMPTS[0], [0, 0, 0, *PROMPTS[1]]])
MASK = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])


@pytest.fixture
def replays(monkeypatch):
    made = Replays()
    monkeypatch.setattr(model_graph, "capture_graph", made.capture)
    monkeypatch.setattr(model_graph, "capturable", lambda _: True)
    monkeypatch.setattr(model_graph, "_every", WeakKeyDictionary())
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A language model, a decoder of other weights, one that has only another last block, and one of adapters."""
    folder = tmp_path_factory.mktemp("readers")
    top = tiny("llama")
    with torch.no_grad():
        for weight in layer_list(top)[-1].parameters():
            weight.mul_(0.5)
    for name, model in (("model", tiny("llama")), ("whole", tiny("llama", seed=3)), ("top", top)):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    random_adapters(folder / "adapters", tiny("llama"), str(folder / "model"))
    return folder


@pytest.fixture(scope="module")
def store(folder):
    """A store whose keys are those of the decoder `whole`."""
    lm = CausalLM.open(str(folder / "model"), device="cpu")
    reader = CausalLM.open(str(folder / "whole"), device="cpu")
    return build(documents(8), folder / "docs.store", lm=reader, window=lm.window(64)).path


def opened(folder, store, decoder="whole", memories="decoder:0.6"):
    """A mixture of its own, so that no graph of another test is replayed."""
    lm = CausalLM.open(str(folder / "model"), device="cpu")
    named = memories.replace("decoder", f"decoder={folder / decoder}")
    return Mixture.open(store, lm, memories=named, use_tuned=False)


@pytest.fixture
def mixture(folder, store):
    return opened(folder, store)


def generate(mixture, ids=IDS, **settings):
    """Tokens, and the log-probabilities of every step."""
    given = {**SETTINGS, "output_logits": True, "return_dict_in_generate": True, **settings}
    torch.manual_seed(5)
    written = KnnForCausalLM(mixture).generate(ids, **given)
    return written.sequences, torch.stack(written.logits)


def plain(monkeypatch, mixture, *arguments, **settings):
    """The same without graphs."""
    with monkeypatch.context() as patch:
        patch.setattr(model_graph, "capturable", lambda _: False)
        return generate(mixture, *arguments, **settings)


def check_alike(found, expected):
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def check_read_alike(monkeypatch, found, read):
    """Check that `read` returns the same without graphs."""
    monkeypatch.setattr(model_graph, "capturable", lambda _: False)
    torch.testing.assert_close(found, read(), rtol=1e-4, atol=1e-4)


def replayed(steps, models=MODELS):
    """How often graphs run in so many passes over one token: also once at each capture, for comparison."""
    return models * (steps - WARM_RUNS)


@pytest.mark.parametrize("decoder", ["whole", "top", "adapters"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"do_sample": True}, {"do_sample": True, "seed": 8}, {"num_beams": 3}, {"num_return_sequences": 3}],
    ids=["greedy", "sampled", "seed", "beams", "sequences"],
)
def test_replayed_passes_are_those_without_a_graph(folder, store, replays, monkeypatch, decoder, settings):
    if "num_return_sequences" in settings:
        settings = {**settings, "do_sample": True}
    mixture = opened(folder, store, decoder)
    assert isinstance(mixture.readers.tops[1], TopLM) == (decoder == "top")
    expected = plain(monkeypatch, mixture, **settings)
    assert replays.captured == 0
    check_alike(generate(mixture, **settings), expected)
    assert replays.captured == MODELS
    assert replays.replayed == replayed(LENGTH - 1)
    check_alike(generate(mixture, **settings), expected)
    assert replays.captured == MODELS
    assert replays.replayed == replayed(LENGTH - 1) + MODELS * (LENGTH - 1)


@pytest.mark.parametrize("decoder", ["whole", "top"])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_replayed_passes_over_padded_prompts_are_those_without_a_graph(
    folder, store, replays, monkeypatch, decoder, settings
):
    mixture = opened(folder, store, decoder)
    settings = {**settings, "attention_mask": MASK}
    expected = plain(monkeypatch, mixture, PADDED, **settings)
    for _ in range(2):
        check_alike(generate(mixture, PADDED, **settings), expected)
    # A graph that has read padding reads texts without any, and the reverse.
    others = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    check_alike(generate(mixture, others), plain(monkeypatch, mixture, others))
    check_alike(generate(mixture, PADDED, **settings), expected)
    assert replays.captured == MODELS * (1 if not settings.get("num_beams") else 2)
    assert replays.replayed > 2 * (LENGTH - 1)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_text_that_outgrows_a_capacity_is_read_with_the_next_one(mixture, replays, monkeypatch, settings):
    monkeypatch.setattr(model_graph, "MIN_CAPACITY", 8)
    settings = {**settings, "max_new_tokens": 70}
    check_alike(generate(mixture, **settings), plain(monkeypatch, mixture, **settings))
    capacities = sorted(shape.capacity for shape in model_graphs(reader(mixture))._graphs)
    assert capacities == [16, 32, 64, 128]  # a text of 7 tokens is left before its passes are captured
    check_alike(generate(mixture, **settings), plain(monkeypatch, mixture, **settings))


def test_text_longer_than_the_largest_capacity_is_read_without_a_graph(mixture, replays, monkeypatch):
    monkeypatch.setattr(model_graph, "MIN_CAPACITY", 8)
    monkeypatch.setattr(model_graph, "MAX_CAPACITY", 16)
    check_alike(generate(mixture), plain(monkeypatch, mixture))
    assert {shape.capacity for shape in model_graphs(reader(mixture))._graphs} == {16}
    assert replays.replayed < replayed(LENGTH - 1)


def reader(mixture):
    """The model, or its last blocks, that reads each token beside the language model."""
    return mixture.readers.tops[1] or mixture.readers.models[1]


def test_states_that_a_store_reads_are_those_without_a_graph(folder, store, replays, monkeypatch):
    mixture = opened(folder, store, memories="knn:0.5,decoder:0.2")
    assert len(mixture.readers.models) == 2
    expected = plain(monkeypatch, mixture)
    check_alike(generate(mixture), expected)
    (shape,) = model_graphs(reader(mixture))._graphs
    assert len(shape.layers) == 1
    assert shape.logits
    only = opened(folder, store, memories="knn:0.5")
    check_alike(generate(only), plain(monkeypatch, only))
    (shape,) = model_graphs(reader(only))._graphs
    assert not shape.logits
    assert replays.replayed == 2 * replayed(LENGTH - 1)


def step_by_step(model, rows):
    """Generate greedily from some prompts at once, one step of each in turn; return (texts, T, V) log-probabilities."""
    caches, found = [None] * len(rows), [[] for _ in rows]
    ids = [torch.tensor([row]) for row in rows]
    with torch.inference_mode():
        for _ in range(LENGTH):
            for number, tokens in enumerate(ids):
                output = model(tokens, past_key_values=caches[number], use_cache=True)
                caches[number] = output.past_key_values
                found[number].append(output.logits[0, -1])
                ids[number] = output.logits[:, -1:].argmax(-1)
    return torch.stack([torch.stack(each) for each in found])


@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[0], PROMPTS[0][::-1]]], ids=["lengths", "equal lengths"])
def test_two_texts_in_turn_do_not_overwrite_each_other(mixture, replays, monkeypatch, prompts):
    model = KnnForCausalLM(mixture)
    found = step_by_step(model, prompts)
    assert replays.replayed > LENGTH
    with monkeypatch.context() as patch:
        patch.setattr(model_graph, "capturable", lambda _: False)
        torch.testing.assert_close(found, step_by_step(model, prompts), rtol=1e-4, atol=1e-4)


def test_copy_of_a_cache_is_continued_beside_it(mixture, replays, monkeypatch):
    """As in a search that tries several continuations."""
    model = KnnForCausalLM(mixture)

    def read():
        with torch.no_grad():
            past = model(IDS, use_cache=True).past_key_values
            for token in range(20, 26):
                past = model(torch.tensor([[token]]), past_key_values=past, use_cache=True).past_key_values
            branches = [past, copy.deepcopy(past), copy.deepcopy(past)]
            found = []
            for step in range(4):
                for number, branch in enumerate(branches):
                    token = torch.tensor([[40 + 10 * number + step]])
                    found.append(model(token, past_key_values=branch, use_cache=True).logits)
        return torch.cat(found)

    found = read()
    assert replays.replayed > 12
    check_read_alike(monkeypatch, found, read)


def test_layers_that_share_the_states_of_others_are_continued_beside_them(mixture, replays):
    lm = reader(mixture)
    run, past = passes(lm)
    for token in range(WARM_RUNS + 2):
        run(token)
    right = copy.deepcopy(past)
    other, again = passes(lm)
    again.layers[:] = [copy.copy(layer) for layer in past.layers]
    for token in range(30, 33):
        run(token)
        other(token + 10)
    with torch.no_grad():
        for cache, first in ((copy.deepcopy(right), 30), (right, 40)):
            for token in range(first, first + 3):
                lm.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            for layer, expected in zip((past if first == 30 else again).layers, cache.layers, strict=True):
                torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-4)


def test_cropped_cache_is_continued(mixture, replays, monkeypatch):
    model = KnnForCausalLM(mixture)

    def read():
        found = []
        with torch.no_grad():
            past = model(IDS, use_cache=True).past_key_values
            for step in range(12):
                found.append(model(torch.tensor([[20 + step]]), past_key_values=past, use_cache=True).logits)
                if step % 3 == 2:
                    past.crop(-2)
        return torch.cat(found)

    found = read()
    assert replays.replayed == replayed(12)
    check_read_alike(monkeypatch, found, read)


@pytest.mark.parametrize("seed", [None, 4], ids=["greedy", "sampled"])
def test_drafted_text_is_that_without_a_graph(mixture, replays, monkeypatch, seed):
    drafter = Drafter(None, StepTimes(extra=0.1, each=0.02))
    settings = {**SETTINGS, "max_new_tokens": 40, "do_sample": seed is not None, "seed": seed}
    model = KnnForCausalLM(mixture)
    expected = model.generate(IDS, **settings)
    before = replays.replayed
    assert torch.equal(model.generate(IDS, **settings, draft=drafter), expected)
    assert replays.replayed > before
    monkeypatch.setattr(model_graph, "capturable", lambda _: False)
    assert torch.equal(model.generate(IDS, **settings), expected)
    assert torch.equal(model.generate(IDS, **settings, draft=drafter), expected)


@pytest.mark.parametrize("seed", [None, 4], ids=["greedy", "sampled"])
@pytest.mark.parametrize("decoder", ["whole", "adapters"])
def test_student_and_model_read_drafts_with_graphs(folder, store, replays, monkeypatch, decoder, seed):
    """Its drafts have different lengths, and some are rejected."""
    mixture = opened(folder, store, decoder)
    never, fast = (StepTimes(extra=extra, each=0.01, weight=1e9) for extra in (1e3, 0.0))
    drafter = Drafter(None, never, student_times=fast)
    settings = {**SETTINGS, "max_new_tokens": 60, "do_sample": seed is not None, "seed": seed}
    model = KnnForCausalLM(mixture)
    found = model.generate(IDS, **settings, draft=drafter)
    assert 0 < drafter.accepted < drafter.drafted
    assert {shape.tokens for shape in model_graphs(mixture.lm)._graphs} >= {8}
    assert {shape.tokens for shape in model_graphs(reader(mixture))._graphs} == {1}
    assert replays.replayed > 20
    monkeypatch.setattr(model_graph, "capturable", lambda _: False)
    assert torch.equal(model.generate(IDS, **settings), found)
    assert torch.equal(model.generate(IDS, **settings, draft=drafter), found)


def test_batch_of_a_server_is_read_as_without_a_graph(mixture, replays, monkeypatch):
    """Sequences join and leave a batch, whose padding is removed."""
    model = KnnForCausalLM(mixture)

    def read():
        batch, found = BatchedCache(model), []
        with torch.inference_mode():
            for rows in ([PROMPTS[1]], [PROMPTS[0]], [[1, 8, 9, 3]]):
                for tokens in rows:
                    prompt = Prompt(list(tokens))
                    read_prompt(model, prompt, max_tokens=9, all_logits=False)
                    batch.join(prompt, 1)
                for step in range(5):
                    _, context = batch.step([[10 + step + row] for row in range(len(batch))])
                    found.append(mixture.predict(context).log_probs())
            for rows in ([0, 2], [0]):
                batch.keep(rows)
                for step in range(5):
                    _, context = batch.step([[20 + step + row] for row in range(len(batch))])
                    found.append(mixture.predict(context).log_probs())
        return torch.cat(found)

    found = read()
    assert replays.captured == MODELS * 3  # batches of one, two and three sequences
    assert replays.replayed > 12
    check_read_alike(monkeypatch, found, read)


def test_layer_that_is_cut_on_the_left_is_copied_within_its_buffer(mixture, replays):
    """Its states overlap with those that they are copied to."""
    lm = reader(mixture)
    run, past = passes(lm)
    for token in range(6):
        run(token)
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:, :, 2:], layer.values[:, :, 2:]
    right = copy.deepcopy(past)
    found = run(30)
    expected = lm.model(torch.tensor([[30]]), past_key_values=right, use_cache=True).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def passes(lm, rows=1):
    """A cache that is filled with a text, and a function that reads one more token into it."""
    past = DynamicCache(config=lm.model.config)

    @torch.no_grad()
    def run(token):
        ids = torch.full((rows, 1), token)
        (logits,) = read_with_graph(ModelPass(lm, [], True, {"input_ids": ids, "past_key_values": past}))
        return logits

    with torch.no_grad():
        lm.model(torch.tensor([PROMPTS[0]] * rows), past_key_values=past, use_cache=True)
    return run, past


def test_layers_of_the_cache_are_views_after_a_replay(mixture, replays):
    run, past = passes(reader(mixture))
    places = []
    for step in range(WARM_RUNS + 4):
        run(9)
        assert all(type(layer) is DynamicLayer for layer in past.layers)
        assert {layer.get_seq_length() for layer in past.layers} == {len(PROMPTS[0]) + step + 1}
        places.append(past.layers[0].keys.data_ptr())
    assert len(set(places[WARM_RUNS + 1 :])) == 1


def test_result_of_a_pass_is_not_changed_by_the_next_one(mixture, replays):
    run, _ = passes(reader(mixture))
    for _ in range(WARM_RUNS + 1):
        run(9)
    first = run(9)
    kept = first.clone()
    run(10)
    assert torch.equal(first, kept)


def test_values_that_are_not_finite_do_not_reach_another_text(mixture, replays):
    lm = reader(mixture)
    broken, past = passes(lm)
    for _ in range(WARM_RUNS + 2):
        broken(9)
    for layer in past.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    broken(9)
    run, _ = passes(lm)
    assert run(9).isfinite().all()


def test_model_whose_graph_computes_something_else_is_used_without(mixture, replays, monkeypatch):
    expected = plain(monkeypatch, mixture)

    def update(self, keys, values, *_, **__):
        self.keys.index_copy_(2, self.place, keys * 1.5)
        self.values.index_copy_(2, self.place, values)
        return self.keys, self.values

    monkeypatch.setattr(model_graph._Buffers, "update", update)
    with pytest.warns(KnnlmWarning, match="computes something else as a CUDA graph") as found:
        check_alike(generate(mixture), expected)
    assert len([each for each in found if each.category is KnnlmWarning]) == MODELS
    assert replays.captured == replays.replayed == MODELS
    with warnings.catch_warnings():
        warnings.simplefilter("error", KnnlmWarning)
        check_alike(
            generate(mixture, PADDED, attention_mask=MASK), plain(monkeypatch, mixture, PADDED, attention_mask=MASK)
        )
    assert replays.captured == MODELS


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted when stream is capturing"), KeyError("rows")])
def test_failed_capture_is_reported_once_and_generation_goes_on(mixture, replays, monkeypatch, error):
    expected = plain(monkeypatch, mixture)

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(model_graph, "capture_graph", refuse)
    with pytest.warns(KnnlmWarning, match=r"cannot be captured into a CUDA graph \(") as found:
        check_alike(generate(mixture), expected)
    assert len([each for each in found if each.category is KnnlmWarning]) == MODELS
    with warnings.catch_warnings():
        warnings.simplefilter("error", KnnlmWarning)
        check_alike(generate(mixture), expected)


def test_too_little_memory_for_a_graph_is_no_warning(mixture, replays, monkeypatch, recwarn):
    expected, tried = plain(monkeypatch, mixture), []

    def refuse(*_, **__):
        tried.append(None)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model_graph, "capture_graph", refuse)
    check_alike(generate(mixture), expected)
    assert len(tried) == MODELS
    assert not [each for each in recwarn if each.category is KnnlmWarning]


# Layers of a sliding window, models that take no positions, and those that read the lengths of tensors or values.
WITHOUT = {"mistral", "gemma2", "gemma3", "bloom", "mpt", "gpt_neo", "falcon_sequential", "dbrx"}


def read_padded(lm, lengths=(1,) * 8):
    """The (B, T, V) logits of steps of so many tokens after two texts, one of which is padded."""
    past, mask = DynamicCache(config=lm.model.config), MASK[[1, 0]]
    steps = [PADDED[[1, 0]], *(9 + step + torch.arange(2 * length).view(2, -1) for step, length in enumerate(lengths))]
    found = []
    with torch.no_grad():
        for tokens in steps:
            if found:
                mask = torch.cat([mask, torch.ones_like(tokens)], 1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            texts = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
            accepted = accepted_arguments(type(lm.model).forward)
            inputs = {name: value for name, value in texts.items() if name in accepted}
            (logits,) = read_with_graph(ModelPass(lm, [], True, {**inputs, "past_key_values": past, "use_cache": True}))
            found.append(logits)
            if tokens.shape[1] == 3:  # as after a draft
                past.crop(-2)
                mask = mask[:, :-2]
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("family", "attention"), [*((family, None) for family in FAMILIES), ("llama", "eager"), ("gpt2", "eager")]
)
@pytest.mark.filterwarnings("ignore::knnlm.errors.KnnlmWarning")
def test_passes_of_each_family_are_those_without_a_graph(replays, monkeypatch, family, attention):
    lm = CausalLM(tiny(family), tiny_tokenizer(), name=family)
    if attention is not None:
        lm.model.set_attn_implementation(attention)
    drafts = (1, 3, 1, 2, 3, 1, 8, 1, 3, 12, 1, 2)
    found = [read_padded(lm), read_padded(lm, drafts)]
    graphs = model_graphs(lm)._graphs
    expected = replayed(8 + drafts.count(1), models=1) + replayed(sum(1 < each < 9 for each in drafts), models=1)
    if family in WITHOUT:
        assert replays.replayed == 0
    else:
        assert replays.replayed == expected
        assert {shape.tokens for shape in graphs} == {1, 8}
        (held,) = {captured.held for captured in graphs.values()}
        assert len(held.storages) == len(layer_list(lm.model))
    monkeypatch.setattr(model_graph, "capturable", lambda _: False)
    torch.testing.assert_close(found[0], read_padded(lm), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], read_padded(lm, drafts), rtol=1e-4, atol=1e-4)


def test_half_precision_is_captured(replays):
    lm = CausalLM(tiny("llama").bfloat16(), tiny_tokenizer(), name="half")
    run, past = passes(lm)
    right = copy.deepcopy(past)
    for step in range(8):
        found = run(9 + step)
        with torch.no_grad():
            expected = lm.model(torch.tensor([[9 + step]]), past_key_values=right, use_cache=True).logits
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    assert replays.replayed == replayed(8, models=1)


def test_pass_that_makes_the_host_wait_is_not_captured(replays, monkeypatch):
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="waits")
    forward = lm.model.model.norm.forward
    lm.model.model.norm.forward = lambda hidden: forward(hidden) * (1.0 if float(hidden.sum()) else 2.0)
    run, _ = passes(lm)
    for _ in range(WARM_RUNS):
        run(9)
    with pytest.warns(KnnlmWarning, match="makes the host wait"):
        run(9)
    run(9)
    assert replays.captured == 0


def test_operations_that_make_the_host_wait_are_refused():
    tensor = torch.arange(6.0).view(2, 3)
    with model_graph._RefuseSynchronisation():
        assert tensor[torch.tensor([1, 0])].shape == (2, 3)
        assert torch.where(tensor > 2, tensor, 0).shape == (2, 3)
        mask = tensor > 2
        for wait in (
            lambda: bool(tensor[0, 0]),
            tensor.nonzero,
            lambda: tensor[mask],
            lambda: tensor.__setitem__(mask, torch.ones(3)),
            lambda: tensor.to("meta"),
        ):
            with pytest.raises(RuntimeError, match=r"makes the host wait|copies between devices"):
                wait()


def test_model_that_asks_the_cache_for_its_length_is_not_captured(replays):
    """The graph would contain the length that it was captured with."""
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="counts")
    forward = lm.model.forward

    def counting(*arguments, past_key_values, **others):
        others["position_ids"] = torch.full((1, 1), past_key_values.get_seq_length() % 64)
        return forward(*arguments, past_key_values=past_key_values, **others)

    run, past = passes(lm)
    right = copy.deepcopy(past)
    lm.model.forward = counting
    with pytest.warns(KnnlmWarning, match="computes something else"):
        found = torch.cat([run(9 + step) for step in range(6)])
    lm.model.forward = forward
    with torch.no_grad():
        expected = [lm.model(torch.tensor([[9 + step]]), past_key_values=right).logits for step in range(6)]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_passes_of_other_kinds_are_not_captured(replays, monkeypatch):
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="kinds")

    def shape(tokens=1, **changed):
        _, past = passes(lm)
        inputs = {"input_ids": torch.full((1, tokens), 9), "past_key_values": past, **changed}
        return ModelPass(lm, [], True, {name: value for name, value in inputs.items() if value is not None}).shape()

    _, past = passes(lm)
    plain_pass = ModelPass(lm, [], True, {"input_ids": torch.full((1, 1), 9), "past_key_values": past})
    total = len(PROMPTS[0]) + 1
    several = torch.ones(1, total + 3), torch.arange(total - 1, total + 3)[None]
    mask, positions = torch.ones(1, total), torch.tensor([[total - 1]])
    with torch.no_grad():
        assert shape() is not None
        assert shape(attention_mask=mask, position_ids=positions) is not None
        assert shape(tokens=2) is not None
        assert shape(tokens=4, attention_mask=several[0], position_ids=several[1]) is not None
        assert shape(tokens=4, attention_mask=mask, position_ids=positions) is None
        assert shape(tokens=33) is None
        assert shape(past_key_values=None) is None
        assert shape(attention_mask=mask) is None  # its positions depend on the family
        assert shape(attention_mask=mask[:, 1:], position_ids=positions) is None
        assert shape(attention_mask=mask[:, None, None], position_ids=positions) is None
        assert shape(position_ids=positions.expand(3, 1, 1)) is None
        lm.model.train()
        assert shape() is None
        lm.model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            assert shape() is None
        assert plain_pass.shape() is not None
        monkeypatch.setattr(lm.model.config, "_attn_implementation_internal", "flash_attention_2")
        assert plain_pass.shape() is None
        monkeypatch.setattr(lm.model.config, "_attn_implementation_internal", "sdpa")
    assert shape() is None  # gradients may be wanted
    monkeypatch.undo()
    with torch.no_grad():
        assert shape() is None  # on a CPU


def test_moved_weights_are_captured_again(replays):
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="moved")
    run, _ = passes(lm)
    for _ in range(WARM_RUNS + 2):
        run(9)
    assert replays.captured == 1
    for weight in lm.model.parameters():
        weight.data = weight.data * 0.5
    right, _ = passes(lm)
    found = run(9)  # continues the text of the other weights
    assert replays.replayed == 2
    assert len(model_graphs(lm)) == 0
    assert not torch.equal(found, right(9))
    for _ in range(WARM_RUNS + 1):
        run(9)
    assert replays.captured == 2


def test_weights_that_are_changed_in_place_are_used(replays):
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="changed")
    run, _ = passes(lm)
    for _ in range(WARM_RUNS + 2):
        run(9)
    with torch.no_grad():
        lm.model.lm_head.weight.mul_(2.0)
    run, past = passes(lm)
    right = copy.deepcopy(past)
    expected = lm.model(torch.tensor([[9]]), past_key_values=right, use_cache=True).logits
    torch.testing.assert_close(run(9), expected, rtol=1e-4, atol=1e-4)
    assert replays.captured == 1


def test_number_of_graphs_is_limited_and_those_that_are_not_used_are_dropped(replays, monkeypatch):
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="many")

    def read(rows):
        run, _ = passes(lm, rows)
        for _ in range(WARM_RUNS + 2):
            run(9)

    for rows in range(1, MAX_GRAPHS):
        read(rows)
    thread = threading.Thread(target=read, args=(1,))
    thread.start()
    thread.join()
    assert replays.captured == len(model_graphs(lm)) == MAX_GRAPHS
    read(MAX_GRAPHS)
    assert replays.captured == MAX_GRAPHS + 1
    assert len(model_graphs(lm)) == MAX_GRAPHS
    read(MAX_GRAPHS + 1)
    assert replays.captured == MAX_GRAPHS + 1
    monkeypatch.setattr(model_graph, "KEPT_PASSES", 2 * (WARM_RUNS + 2))
    read(MAX_GRAPHS + 1)
    assert replays.captured == MAX_GRAPHS + 2
    assert len(model_graphs(lm)) == 2  # and the one before it
    read(1)
    assert replays.captured == MAX_GRAPHS + 3
    assert replays.pools[0] is None
    assert len({id(pool) for pool in replays.pools[1:]}) == 1


def test_threads_generate_at_the_same_time(mixture, replays, monkeypatch):
    prompts = [torch.tensor([[1, 5 + number, 9, 7]]) for number in range(4)]
    model, found = KnnForCausalLM(mixture), {}
    settings = {**SETTINGS, "max_new_tokens": 30}

    together = threading.Barrier(len(prompts))

    def read(number):
        together.wait()
        found[number] = model.generate(prompts[number], **settings)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replays.captured == MODELS * len(prompts)
    monkeypatch.setattr(model_graph, "capturable", lambda _: False)
    for number, ids in enumerate(prompts):
        assert torch.equal(found[number], model.generate(ids, **settings))


def test_graphs_do_not_outlive_their_model(replays, monkeypatch):
    # Like a graph, and unlike the stand-in, this does not keep what was captured.
    monkeypatch.setattr(model_graph, "capture_graph", lambda run, *_, **__: CapturedGraph(run(), lambda: None))
    lm = CausalLM(tiny("llama"), tiny_tokenizer(), name="short")
    run, past = passes(lm)
    for _ in range(WARM_RUNS + 2):
        run(9)
    graphs, gone = ref(model_graphs(lm)), ref(lm)
    assert len(graphs()) == 1
    del lm, run
    gc.collect()
    assert gone() is None
    assert graphs() is None
    assert past.layers[0].keys.isfinite().all()


def test_nothing_is_captured_on_a_cpu(mixture, monkeypatch):
    made = Replays()
    monkeypatch.setattr(model_graph, "capture_graph", made.capture)
    generate(mixture)
    assert made.captured == 0
