"""The model of lm-evaluation-harness: against the harness's own model, NumPy, and the mixture's own methods.

Tests that need the harness have the marker lm_eval, and import it themselves.
"""

from __future__ import annotations

import json
import math
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import oracle
from helpers.cli import failure, knnlm
from helpers.models import BOS, TEXT, tiny_tokenizer
from helpers.server import serving
from helpers.stores import documents
from knnlm.corpus import Document
from knnlm.errors import MissingExtra, ParameterError
from knnlm.ingest.build import build
from knnlm.lm import loading
from knnlm.lm.causal import CausalLM
from knnlm.lm.windows import WindowShape
from knnlm.mixture.mixture import Mixture

ROOT = Path(__file__).parent.parent.parent
needs_harness = pytest.mark.lm_eval
CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[a] {% endif %}"
)
SENTENCES = [sentence.strip() + "." for sentence in TEXT.replace("\n", " ").split(". ")]


@pytest.fixture(scope="module", autouse=True)
def _private_cache(tmp_path_factory):
    """Keep the data sets of tests out of the cache of the user."""
    if "lm_eval" in sys.modules or _installed():
        import datasets

        datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
        datasets.disable_progress_bars()


def _installed() -> bool:
    from importlib.util import find_spec

    return find_spec("lm_eval") is not None


@pytest.fixture(scope="module")
def small(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "docs.store"
    return build(documents(12), path, lm=lm, window=WindowShape(24, 12), segment_entries=200)


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number, ("task", number, 1)) for number, given in enumerate(arguments)]


def wrap(lm, store, *, add_bos_token=None, batch_size=8, **settings):
    from knnlm.integrations.lm_eval import KnnLM

    return KnnLM(Mixture.open(store.path, lm, **settings), add_bos_token=add_bos_token, batch_size=batch_size)


def hflm(lm, **settings):
    from lm_eval.models.huggingface import HFLM

    return HFLM(lm.model, tokenizer=lm.tokenizer, backend="causal", batch_size=4, **settings)


PAIRS = [
    ("The memory of a model is", " a list of contexts"),
    ("The memory of a model is ", "a list"),  # a space that belongs to the continuation
    ("The memory of a model is", " q"),
    ("", "When the model reads"),
    (f"{BOS}The memory", " of"),
    *((sentence[:20], sentence[20:]) for sentence in SENTENCES),
    (TEXT[:600], " and no more"),  # longer than the model reads at once
]


@needs_harness
def test_lambda_zero_gives_the_numbers_of_the_harness_own_model(lm, small):
    requests = instances("loglikelihood", *PAIRS)
    expected = hflm(lm).loglikelihood(requests, disable_tqdm=True)
    found = wrap(lm, small, lmbda=0.0).loglikelihood(requests, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@needs_harness
def test_tokenizer_that_adds_bos_itself_gives_the_numbers_of_the_harness_own_model(lm, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, number)])
    with_bos = CausalLM(lm.model, tokenizer, name="tiny-llama")
    store = build(documents(4), tmp_path / "docs.store", lm=with_bos)
    requests = instances("loglikelihood", *PAIRS)
    expected = hflm(with_bos).loglikelihood(requests, disable_tqdm=True)
    for add_bos_token in (None, True):
        model = wrap(with_bos, store, lmbda=0.0, add_bos_token=add_bos_token)
        assert model.tok_encode("The memory")[:2].count(number) == 1
        found = model.loglikelihood(requests, disable_tqdm=True)
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)


@needs_harness
def test_loglikelihood_agrees_with_numpy_token_by_token(lm, small):
    lmbda, k, temperature = 0.4, 10_000, 5.0
    model = wrap(lm, small, lmbda=lmbda, k=k, knn_temperature=temperature)
    pairs = [(sentence[:30], sentence[30:60]) for sentence in SENTENCES[:3]]
    found = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    keys = small.take(torch.arange(small.key_count)).numpy()
    values = small.values(torch.arange(small.entry_count)).numpy()
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        # Some pairs are cut inside a word, where the tokens of the context are not those of the whole text.
        begin = len(lm.encode(context))
        text = [*lm.encode(context), *lm.encode(context + continuation)[begin:]]
        queries, p_lm = oracle.read_token_by_token(
            lm.model, lm.model.model.layers[-1].mlp, text[1:], start_token=text[0], context=len(text), stride=1
        )
        total, best = 0.0, True
        for position in range(begin - 1, len(text) - 1):
            votes = oracle.knn_distribution(
                queries[position], keys, values, lm.vocab_size, k=k, knn_temperature=temperature
            )
            probs = oracle.mix(p_lm[position], votes, lmbda)
            total += math.log(probs[text[position + 1]])
            best &= int(np.argmax(probs)) == text[position + 1]
        assert score == pytest.approx(total, abs=1e-4)
        assert greedy == best


@needs_harness
def test_server_gives_the_same_loglikelihoods(lm, small, model_folder):
    """The harness's client of completions, with echo and logprobs; the server adds the start token itself."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = wrap(lm, small, lmbda=0.4, memories="knn,cache", add_bos_token=True)
    requests = instances("loglikelihood", *(pair for pair in PAIRS[:-1] if pair[0] and not pair[0].startswith(BOS)))
    with serving(model.mixture) as server:
        client = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="docs",
            tokenizer=str(model_folder),
            tokenizer_backend="huggingface",
            max_length=128,
        )
        expected = client.loglikelihood(requests, disable_tqdm=True)
    found = model.loglikelihood(requests, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@needs_harness
def test_rolling_loglikelihood_is_the_sum_of_the_evaluation(lm, small):
    model = wrap(lm, small, lmbda=0.4, memories="knn,cache")
    texts = [document.text for document in documents(3, start=100)]
    found = model.loglikelihood_rolling(instances("loglikelihood_rolling", *((text,) for text in texts)))
    for text, score in zip(texts, found, strict=True):
        measured = model.mixture.evaluate([Document("a", "a", text)])
        assert score == pytest.approx(-math.log(measured.perplexity) * measured.tokens, rel=1e-6)
    measured = model.mixture.evaluate([Document(str(n), "a", text) for n, text in enumerate(texts)])
    assert sum(found) == pytest.approx(-math.log(measured.perplexity) * measured.tokens, rel=1e-5)
    assert model.loglikelihood_rolling(instances("loglikelihood_rolling", ("",))) == [0.0]


@needs_harness
def test_rolling_loglikelihood_with_lambda_zero_is_that_of_the_harness_own_model(lm, small):
    # Shorter than a window, because the harness moves its windows by another rule.
    requests = instances("loglikelihood_rolling", *((sentence[:30],) for sentence in SENTENCES))
    assert max(len(lm.encode(sentence[:30])) for sentence in SENTENCES) <= 24
    found = wrap(lm, small, lmbda=0.0).loglikelihood_rolling(requests)
    assert found == pytest.approx(hflm(lm).loglikelihood_rolling(requests, disable_tqdm=True), abs=1e-4)


PROMPTS = [sentence[: 10 + 3 * number] for number, sentence in enumerate(SENTENCES)]


@needs_harness
@pytest.mark.parametrize("batch_size", [1, 3])
def test_generation_is_that_of_the_mixture(lm, small, batch_size):
    model = wrap(lm, small, lmbda=0.4, memories="knn,cache,ngram", add_bos_token=True, batch_size=batch_size)
    requests = [(prompt, {"until": [], "max_gen_toks": 8 + number % 2}) for number, prompt in enumerate(PROMPTS)]
    found = model.generate_until(instances("generate_until", *requests))
    end = lm.tokenizer.eos_token
    for (prompt, settings), text in zip(requests, found, strict=True):
        expected = model.mixture.generate(prompt, max_new_tokens=settings["max_gen_toks"], do_sample=False)
        assert text == expected.split(end)[0]
    assert len(set(found)) > 1


@needs_harness
def test_generation_ends_before_a_stop_string(lm, small):
    model = wrap(lm, small, lmbda=0.6, add_bos_token=True)
    prompt = "The memory of a model"
    (whole,) = model.generate_until(instances("generate_until", (prompt, {"max_gen_toks": 20})))
    stop = whole[6:8]
    settings = {"until": [stop], "max_gen_toks": 20, "do_sample": False, "temperature": 0.0}
    (found,) = model.generate_until(instances("generate_until", (prompt, settings)))
    assert found == whole[: whole.index(stop)]
    (same,) = model.generate_until(instances("generate_until", (prompt, {"until": stop, "max_gen_toks": 20})))
    assert same == found


@needs_harness
def test_generation_with_lambda_zero_is_that_of_the_harness_own_model(lm, small):
    requests = instances("generate_until", *((prompt, {"until": [" a"], "max_gen_toks": 12}) for prompt in PROMPTS))
    expected = hflm(lm).generate_until(requests, disable_tqdm=True)
    assert wrap(lm, small, lmbda=0.0).generate_until(requests) == expected


@needs_harness
def test_sampling_and_empty_and_long_prompts(lm, small):
    model = wrap(lm, small, lmbda=0.4)
    settings = {"max_gen_toks": 5, "do_sample": True, "temperature": 0.9}
    found = model.generate_until(instances("generate_until", ("", settings), (TEXT, settings)))
    assert all(isinstance(text, str) for text in found)
    with pytest.raises(ParameterError, match="generates 128 tokens"):
        model.generate_until(instances("generate_until", ("a", {"max_gen_toks": 128})))


@needs_harness
def test_chat_template_is_that_of_the_tokenizer(lm, small):
    model = wrap(lm, small, lmbda=0.4)
    history = [{"role": "user", "content": "Where are the others?"}]
    with pytest.raises(ParameterError, match="no chat template"):
        model.apply_chat_template(history)
    model.tokenizer = tiny_tokenizer()
    model.tokenizer.chat_template = CHAT
    assert model.apply_chat_template(history) == "[user] Where are the others?\n[a] "
    assert model.chat_template(True) == CHAT
    assert "/" not in model.tokenizer_name


@needs_harness
def test_cached_results_are_kept_by_the_harness(lm, small, tmp_path):
    from lm_eval.api.model import CachingLM

    model = wrap(lm, small, lmbda=0.4)
    cached = CachingLM(model, str(tmp_path / "cache.db"))
    requests = instances("loglikelihood", *PAIRS[:3])
    first = cached.loglikelihood(requests)
    model._loglikelihood_tokens = None
    assert cached.loglikelihood(requests) == first


def texts_of_task() -> list[Document]:
    """Two texts that the store does not contain, and three that it contains."""
    new = [" ".join(reversed(document.text.split())) for document in documents(2)]
    return [*(Document(f"n{number}", "new", text) for number, text in enumerate(new)), *documents(3)]


@needs_harness
def test_overlap_is_that_of_all_stores(lm, small, tmp_path):
    other = build(documents(3, words=60, start=700), tmp_path / "other.store", lm=lm, window=WindowShape(24, 12))
    model = wrap(lm, small, memories=f"knn,knn={other.path}", lmbda=0.4)
    new, first, second = texts_of_task()[0], documents(1)[0], documents(3, words=60, start=700)[1]
    requests = [("", new.text[:80]), ("", first.text), (second.text, " a"), ("", "short")]
    model.loglikelihood(instances("loglikelihood", *requests), disable_tqdm=True)
    overlap = model.get_model_info()["knnlm"]["overlap"]
    assert overlap["tasks"] == {"task": {"items": 4, "items_in_store": 2}}
    assert {first.id, second.id} <= set(overlap["document_ids"])
    assert overlap["documents"] == len(overlap["document_ids"])


def write_tasks(folder: Path) -> Path:
    """Write local tasks of three kinds."""
    folder.mkdir(exist_ok=True)
    choices = [
        {"question": f"{sentence[:40]}", "choices": [" model", " books", " rooms"], "answer": number % 3}
        for number, sentence in enumerate(SENTENCES)
    ]
    (folder / "choices.jsonl").write_text("\n".join(map(json.dumps, choices)))
    texts = [{"text": document.text} for document in texts_of_task()]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    for name, data, lines in (
        (
            "local_choices",
            "choices",
            "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
            "metric_list:\n  - metric: acc\n",
        ),
        (
            "local_text",
            "texts",
            "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
            "metric_list:\n  - metric: word_perplexity\n",
        ),
        (
            "local_answers",
            "choices",
            "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{choices[answer]}}'\n"
            "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 6\nmetric_list:\n  - metric: exact_match\n",
        ),
    ):
        files = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / data}.jsonl\ntest_split: test\n"
        )
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{files}{lines}")
    return folder


TASKS = "local_choices,local_text,local_answers"


@needs_harness
def test_command_runs_local_tasks_and_names_store_weights_and_overlap(lm, small, model_folder, tmp_path, capfd):
    tasks = write_tasks(tmp_path / "tasks")
    common = ["lm-eval", small.path, "--tasks", TASKS, "--include-path", tasks, "--model", model_folder, "--no-rerank"]
    code, out, err = knnlm(capfd, *common, "--lambda", "0.4", "--json")
    assert code == 0, err
    found = json.loads(out)
    used = found["config"]["knnlm"]
    assert used["store"] == str(small.path)
    assert used["fingerprint"] == small.fingerprint
    assert (used["weights"], used["lambda"], used["memories"]) == ("fixed", 0.4, ["knn"])
    overlap = used["overlap"]
    assert overlap["tasks"]["local_text"] == {"items": 5, "items_in_store": 3}
    assert (overlap["ngram"], overlap["items"]) == (13, 5 + 2 * len(SENTENCES))
    assert {"d0", "d1", "d2"} <= set(overlap["document_ids"])
    assert overlap["documents"] >= len(overlap["document_ids"])
    words, total = 0, 0.0
    mixture = Mixture.open(small.path, lm, lmbda=0.4)
    for document in texts_of_task():
        measured = mixture.evaluate([document])
        words += len(re.split(r"\s+", document.text))
        total += math.log(measured.perplexity) * measured.tokens
    assert found["results"]["local_text"]["word_perplexity,none"] == pytest.approx(math.exp(total / words), rel=1e-3)
    code, out, err = knnlm(capfd, *common, "--lambda", "0.4", "--limit", "2")
    assert code == 0, err
    assert "local_choices acc" in out
    assert "fixed, λ 0.4" in out
    assert small.fingerprint in out


@needs_harness
def test_lambda_zero_gives_the_results_of_the_harness_own_model(lm, small, tmp_path):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from knnlm.integrations.lm_eval import evaluate_tasks

    tasks = write_tasks(tmp_path / "tasks")
    names = ["local_choices", "local_answers"]
    manager = TaskManager(include_path=str(tasks))
    expected = simple_evaluate(hflm(lm), tasks=names, task_manager=manager, log_samples=False)["results"]
    found = evaluate_tasks(wrap(lm, small, lmbda=0.0), names, include_path=tasks)["results"]
    assert found["local_choices"]["acc,none"] == expected["local_choices"]["acc,none"]
    assert found["local_answers"]["exact_match,none"] == expected["local_answers"]["exact_match,none"]


@needs_harness
def test_unknown_task_and_bad_batch_size_are_errors(small, model_folder, capfd, lm):
    from knnlm.integrations.lm_eval import KnnLM

    message = failure(capfd, "lm-eval", small.path, "--tasks", "no_such_task", "--model", model_folder)
    assert "no task no_such_task" in message
    with pytest.raises(ParameterError, match="batch_size"):
        KnnLM(Mixture.open(small.path, lm), batch_size="many")


@needs_harness
def test_entry_point_and_name_lead_to_the_class(small, model_folder):
    from lm_eval.api.registry import get_model

    from knnlm.integrations.lm_eval import KnnLM

    text = (ROOT / "pyproject.toml").read_text()
    value = re.search(r'\[project.entry-points."lm_eval.models"\]\nknnlm = "(.+)"', text).group(1)
    assert EntryPoint("knnlm", value, "lm_eval.models").load() is KnnLM
    assert get_model("knnlm") is KnnLM
    arguments = f"store={small.path},lmbda=0.3,model={model_folder},overlap=False"
    model = KnnLM.create_from_arg_string(arguments, {"batch_size": 2, "device": "cpu", "max_batch_size": None})
    assert model.mixture.lmbda == pytest.approx(0.3)
    assert model.batch_size == 2
    assert model.get_model_info()["knnlm"]["overlap"] is None


@needs_harness
def test_commands_of_the_guide_run(tmp_path, model_folder, monkeypatch, capfd):
    from test_docs import blocks, commands

    monkeypatch.setattr(loading, "bundled_folder", lambda: model_folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for number, document in enumerate(documents(12)):
        (tmp_path / "docs" / f"{number}.txt").write_text(document.text)
    (tmp_path / "valid.txt").write_text(documents(1, words=100, start=60)[0].text)
    ran = 0
    names: dict[str, object] = {}
    for block in blocks((ROOT / "docs" / "guides" / "lm-eval.md").read_text()):
        if block.language in ("yaml", "json"):  # a file of the guide; its name is the block's title
            name = re.fullmatch(r'title="(.+)"', block.info).group(1)
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(block.text + "\n")
        elif block.language == "python":
            exec(block.text, names)
        for arguments in commands(block.text) if block.language == "sh" else []:
            code, _, err = knnlm(capfd, *arguments)
            assert code == 0, err
            ran += 1
    assert ran >= 4


def test_missing_package_is_named(small, capfd, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval" or name.endswith(".lm_eval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'knnlm[lm-eval]'" in failure(capfd, "lm-eval", small.path, "--tasks", "any")
    with pytest.raises(MissingExtra, match="lm-eval"):
        import knnlm.integrations.lm_eval  # noqa: F401
