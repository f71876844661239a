"""A mixture as a model of lm-evaluation-harness.

Texts are tokenised as by the harness's own model `hf`, so that both give the same numbers where λ is 0. Only positions
of continuations are searched for, unless the mixture has online weights. Results contain the store, its fingerprint,
the weights, and the documents of the store that contain test items.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knnlm.corpus import Document
from knnlm.datastore.store import Datastore
from knnlm.errors import MissingExtra, ParameterError
from knnlm.evaluation.continuations import score_continuations
from knnlm.evaluation.overlap import NGRAM, find_overlap
from knnlm.generation.causal import KnnForCausalLM
from knnlm.memories.knn import KnnMemory
from knnlm.mixture.mixture import Mixture
from knnlm.mixture.spec import MixtureOptions
from knnlm.progress import Progress, silent

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise MissingExtra("The evaluation harness", "lm-eval", "lm-eval") from error

_DEFAULT_MAX_LENGTH = 2048  # of models with unlimited positions, as in the harness
_MAX_NEW_TOKENS = 256  # where a task does not specify it, as in the harness
_MAX_DOCUMENTS = 20  # ids of documents in the results

Request = tuple[tuple[str, str], list[int], list[int]]  # texts of context and continuation, and the tokens of both


class KnnLM(TemplateLM):
    """The model `knnlm` of the harness.

    `store` is a path or an open mixture; `memories`, `k`, `knn_temperature` and `lmbda` are those of `Mixture.open`.
    `add_bos_token` puts the start token before every context, as `knnlm generate` and the server do; None: if the
    tokenizer does so itself. `batch_size` is the number of texts that are generated together. Without `overlap`, the
    store is not searched for test items.
    """

    def __init__(
        self,
        store: str | Path | Mixture,
        *,
        memories: str | None = None,
        k: int | None = None,
        knn_temperature: float | None = None,
        lmbda: float | None = None,
        model: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        add_bos_token: bool | None = None,
        max_length: int | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,  # noqa: ARG002  (the harness passes it to every model)
        overlap: bool = True,
        progress: Progress = silent,
    ) -> None:
        super().__init__()
        if not isinstance(store, Mixture):
            options = MixtureOptions(model=model, device=device or "auto", dtype=dtype)
            settings: dict[str, Any] = {"k": k, "knn_temperature": knn_temperature, "lmbda": lmbda}
            store = Mixture.open(store, memories=memories, options=options, **settings)
        store.lm.require_text("The harness")
        self.mixture = store
        self.tokenizer = store.lm.tokenizer
        self.add_bos_token = add_bos_token
        self.max_length = max_length or store.max_length or _DEFAULT_MAX_LENGTH
        self.batch_size = _batch_size(batch_size)
        self.max_gen_toks = _MAX_NEW_TOKENS
        self.overlap = overlap
        self._device = store.lm.device
        self._progress = progress
        self._items: dict[tuple[str, str], list[str]] = {}  # texts of test items, by task and number

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        end = self.tokenizer.eos_token_id
        return int(end) if isinstance(end, int) else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a continuation without a context: the start token of documents."""
        return self.mixture.lm.start_token

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness keeps prompts made by the chat template."""
        return str(self.tokenizer.name_or_path or self.mixture.lm.name).replace("/", "__")

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **others: Any,  # noqa: ARG002
    ) -> list[int]:
        """Return the tokens of a text; a BOS token that the text begins with is not added again."""
        begins = has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id]))
        if add_special_tokens is None and begins:
            add_special_tokens = False
        special = add_special_tokens if add_special_tokens is not None else self.add_bos_token is None
        tokens = list(self.tokenizer.encode(string, add_special_tokens=special))
        if add_special_tokens is None and self.add_bos_token:
            tokens.insert(0, self.prefix_token_id)
        return tokens

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:  # the harness calls it by this name
        """Return the log-probability of each continuation, and whether greedy generation would produce it."""
        self._note(requests)
        scores: list[tuple[float, bool]] = super().loglikelihood(
            requests, disable_tqdm=disable_tqdm or self._progress is not silent
        )
        return scores

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        **others: Any,  # noqa: ARG002
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        scores = score_continuations(self.mixture, pairs, max_length=self.max_length, progress=self._progress)
        results = [(score.log_prob, score.is_greedy) for score in scores]
        for (texts, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(
        self,
        requests: list[Instance],
        disable_tqdm: bool = False,  # noqa: ARG002
    ) -> list[float]:
        """Return the log-probability of each text, read in the windows of the store as by `knnlm eval`."""
        self._note(requests)
        results = []
        with self._progress("scoring", total=len(requests), unit="texts") as advance:
            for (text,) in (request.args for request in requests):
                results.append(self._text_log_prob(text))
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
                advance(1)
        return results

    def _text_log_prob(self, text: str) -> float:
        if not self.mixture.lm.encode(text):
            return 0.0
        evaluation = self.mixture.evaluate([Document("item", "item", text)])
        return -math.log(evaluation.perplexity) * evaluation.tokens

    def generate_until(
        self,
        requests: list[Instance],
        disable_tqdm: bool = False,  # noqa: ARG002
    ) -> list[str]:
        """Return a continuation of each context up to its stop strings; greedy, unless the task samples."""
        self._note(requests)
        results = [""] * len(requests)
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        settings = [request.args[1] for request in requests]
        with self._progress("generating", total=len(requests), unit="texts") as advance:
            for numbers in _generation_batches(prompts, settings, self.batch_size):
                texts = self._generate([prompts[number] for number in numbers], settings[numbers[0]])
                for number, text in zip(numbers, texts, strict=True):
                    results[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                advance(len(numbers))
        return results

    def _generate(self, prompts: Sequence[Sequence[int]], given: dict[str, Any]) -> Iterator[str]:
        """Continue prompts with the same settings."""
        settings = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        end = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        until = handle_stop_sequences(settings.pop("until", None), eos=end)
        new = settings.pop("max_gen_toks")
        if new >= self.max_length:
            raise ParameterError(f"A task generates {new:,} tokens, but only {self.max_length:,} can be read at once.")
        if not settings.get("do_sample"):
            settings.pop("temperature", None)
        ids, mask = _left_padded(prompts, self.max_length - new, self.eot_token_id, self.mixture.lm.device)
        generated = KnnForCausalLM(self.mixture).generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            pad_token_id=self.eot_token_id,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, until, ids.shape[1], len(ids)),
            **settings,
        )
        for row in generated[:, ids.shape[1] :].tolist():
            text = self.tokenizer.decode(row, skip_special_tokens=True)
            yield str(postprocess_generated_text(text, until, None))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the tokenizer's chat template writes it."""
        if not self.tokenizer.chat_template:
            raise ParameterError(f"The tokenizer of {self.mixture.lm.name} has no chat template.")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness adds to the results: the store, its weights and the test items in it."""
        mixture = self.mixture
        return {
            "model": "knnlm",
            "knnlm": {
                "store": None if mixture.path is None else str(mixture.path),
                "fingerprint": None if mixture.store is None else mixture.store.fingerprint,
                "model": mixture.lm.name,
                "memories": list(mixture.labels),
                "weights": mixture.weights.kind,
                "lambda": mixture.lmbda,
                "online": None if mixture.online is None else mixture.online.as_dict(),
                "add_bos_token": self.add_bos_token,
                "overlap": self._find_overlap() if self.overlap and self._stores() else None,
            },
        }

    def _note(self, requests: Iterable[Instance]) -> None:
        """Keep the texts of the test items."""
        if self.overlap:
            for request in requests:
                texts = list(_strings(request.doc)) or list(_strings(request.args))
                self._items.setdefault((str(request.task_name), str(request.doc_id)), texts)

    def _find_overlap(self) -> dict[str, Any]:
        """Return the items of each task that share an n-gram with a store, and the documents that contain them."""
        tokens = [self.mixture.lm.encode_all(texts) for texts in self._items.values()]
        found = [find_overlap(store, tokens, progress=self._progress) for store in self._stores()]
        contained = [any(each) for each in zip(*(overlap.items for overlap in found), strict=True)]
        documents = [name for overlap in found for name in overlap.documents]
        tasks: dict[str, dict[str, int]] = {}
        for (task, _), hit in zip(self._items, contained, strict=True):
            counts = tasks.setdefault(task, {"items": 0, "items_in_store": 0})
            counts["items"] += 1
            counts["items_in_store"] += hit
        return {
            "ngram": NGRAM,
            "items": len(contained),
            "items_in_store": sum(contained),
            "documents": len(documents),
            "document_ids": documents[:_MAX_DOCUMENTS],
            "tasks": tasks,
        }

    def _stores(self) -> list[Datastore]:
        """Return the mixture's stores, the main one first."""
        stores = [memory.store for memory in self.mixture.memories if isinstance(memory, KnnMemory)]
        return list(dict.fromkeys([*([self.mixture.store] if self.mixture.store is not None else []), *stores]))


register_model("knnlm")(KnnLM)


def evaluate_tasks(
    model: KnnLM,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
) -> dict[str, Any]:
    """Run tasks of the harness, and return its results without the samples.

    `include_path` is a folder with the YAML files of more tasks; `limit` is the number of items of each task.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _task_manager(tasks, include_path)
    results = simple_evaluate(
        model,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=chat_template,
        log_samples=False,
    )
    return dict(results or {})


def _task_manager(tasks: Sequence[str], include_path: str | Path | None) -> TaskManager:
    """Return the tasks of the folder, and those of the harness unless the folder has all that are named."""
    folder = None if include_path is None else str(include_path)
    if folder is not None and not Path(folder).is_dir():
        raise ParameterError(f"{folder} is not a folder with the YAML files of tasks.")
    if folder is not None and tasks:
        # The harness reads thousands of files to list its own tasks, which takes seconds.
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(tasks) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=folder)
    unknown = [task for task in tasks if not Path(task).is_file() and task not in manager.all_tasks]
    if unknown or not tasks:
        raise ParameterError(f"The harness has no task {', '.join(unknown) or 'to run'}. Name tasks, or a YAML file.")
    return manager


def _batch_size(given: int | str) -> int:
    """Return the number of texts of a batch; the harness also allows "auto"."""
    try:
        size = 8 if str(given).startswith("auto") else int(given)
    except ValueError:
        size = 0
    if size < 1:
        raise ParameterError(f"batch_size must be at least 1, or auto, not {given}.")
    return size


def _generation_batches(
    prompts: Sequence[Sequence[int]], settings: Sequence[dict[str, Any]], size: int
) -> Iterator[list[int]]:
    """Group the numbers of prompts with the same settings and of similar length, longest first."""
    groups: dict[str, list[int]] = {}
    for number, own in enumerate(settings):
        groups.setdefault(repr(sorted(own.items())), []).append(number)
    for numbers in groups.values():
        ordered = sorted(numbers, key=lambda number: len(prompts[number]), reverse=True)
        yield from (ordered[first : first + size] for first in range(0, len(ordered), size))


def _left_padded(
    prompts: Sequence[Sequence[int]], longest: int, padding: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the (B, T) last tokens of prompts with padding on the left, and their mask."""
    cut = [list(prompt[-longest:]) for prompt in prompts]
    length = max(map(len, cut))
    ids = torch.tensor([[padding] * (length - len(prompt)) + prompt for prompt in cut], device=device)
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in cut], device=device)
    return ids, mask


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings inside a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)
