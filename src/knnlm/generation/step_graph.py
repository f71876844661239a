"""The prediction of one generated token as a CUDA graph.

A step of generation predicts one position of each text. On a GPU that is a search and some hundred small kernels for
votes, gate and mixture, and launching them takes longer than running them. Where nothing of a step is decided on the
host, it is captured once for each shape of its inputs and replayed: the inputs are copied into the tensors that the
graph reads, and its output is copied from the tensor that it writes. Flags of deferred checks are outputs of the graph;
where one is set, the step is computed again without the graph.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import count
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from knnlm.errors import KnnlmWarning
from knnlm.index.gpu.deferred import check_flag, defer_checks
from knnlm.lm.cuda_graph import WARM_RUNS, CapturedGraph, capture_graph
from knnlm.memories.base import LM_LOGITS, Context, Positions, collect_constants
from knnlm.memories.voting import NeighbourMemory
from knnlm.mixture.mixture import Mixture

MAX_GRAPHS = 8  # of a mixture, of different shapes
MAX_ALL_GRAPHS = 64  # of all mixtures: a server may have one for each combination of overrides


@dataclass(frozen=True)
class _Inputs:
    """The tensors that a step depends on, by name."""

    context: Context
    outside: Tensor | None  # (N,) positions that the language model alone predicts; None: nowhere

    @property
    def tensors(self) -> dict[Any, Tensor]:
        """All of them."""
        named: dict[Any, Tensor] = {**self.context.states}
        if self.context.where is not None:
            named |= {"positions": self.context.where.positions, "tokens": self.context.where.tokens}
        if self.outside is not None:
            named["outside"] = self.outside
        return named

    @property
    def shape(self) -> Hashable:
        """Equal for steps that one graph can compute."""
        return tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in self.tensors.items())

    def copies(self) -> _Inputs:
        """Return the same inputs in tensors of their own."""
        named = {name: tensor.clone() for name, tensor in self.tensors.items()}
        where = None if self.context.where is None else Positions(named["positions"], named["tokens"])
        states = {source: named[source] for source in self.context.states}
        return _Inputs(replace(self.context, states=states, where=where), named.get("outside"))


@dataclass(frozen=True)
class _Captured:
    """A graph, and the tensors that it reads; it writes log-probabilities (N, V) and flags of checks."""

    inputs: _Inputs
    graph: CapturedGraph
    constants: list[Tensor]  # that are read besides the inputs, and that a cache might drop

    @property
    def device(self) -> torch.device:
        """The device of the graph."""
        return self.inputs.context.states[LM_LOGITS].device

    def replay(self, inputs: _Inputs) -> Tensor | None:
        """Return the log-probabilities of other inputs; None: a check failed."""
        for name, tensor in self.inputs.tensors.items():
            tensor.copy_(inputs.tensors[name])
        self.graph.replay()
        output, *flags = self.graph.written
        return None if any(check_flag(flag) for flag in flags) else output.clone()


class StepGraphs:
    """The graphs of a mixture, as long as its weights and settings stay the same."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = ref(mixture)  # which owns this object
        self._graphs: dict[Hashable, _Captured] = {}
        self._steps: Counter[Hashable] = Counter()
        self._settings: tuple[Any, ...] = ()
        self._works = True
        self.last_use = 0  # larger is later

    def __len__(self) -> int:
        return len(self._graphs)

    def predict(self, context: Context, outside: Tensor | None = None, ended: Tensor | None = None) -> Tensor:
        """Return the (N, V) log-probabilities of the tokens that follow N positions.

        On a CPU, nothing is searched for positions `outside` and for those of texts that have `ended`, both (N,).
        """
        mixture = self._mixture()
        assert mixture is not None
        inputs, output = _Inputs(context, outside), None
        if self._works and capturable(mixture, context):
            with _lock:
                captured = self._captured(mixture, inputs)
                output = None if captured is None else captured.replay(inputs)
        if output is None and context.states[LM_LOGITS].device.type == "cpu":
            return _predict_on_cpu(mixture, context, _either(outside, ended))
        return _predict(mixture, inputs) if output is None else output

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._graphs, self._steps = {}, Counter()

    def _captured(self, mixture: Mixture, inputs: _Inputs) -> _Captured | None:
        """Return the graph of such inputs, captured now if enough such steps were taken; None: there is none yet."""
        settings = _settings(mixture)
        if len(settings) != len(self._settings) or any(
            a is not b for a, b in zip(settings, self._settings, strict=True)
        ):
            self.clear()
            self._settings = settings
        self.last_use, shape = next(_uses), inputs.shape
        if shape not in self._graphs:
            self._steps[shape] += 1
            if self._steps[shape] <= WARM_RUNS or len(self._graphs) >= MAX_GRAPHS:
                return None
            try:
                self._graphs[shape] = _capture(mixture, inputs)
            except RuntimeError as error:
                self._works = False
                warnings.warn(
                    f"A step of generation cannot be captured into a CUDA graph ({error}). It is slower without.",
                    KnnlmWarning,
                    stacklevel=2,
                )
        return self._graphs.get(shape)


# Graphs of a device share the memory of their temporary tensors, so that only one of them runs at a time.
_lock = RLock()
_uses = count(1)
_every: WeakKeyDictionary[Mixture, StepGraphs] = WeakKeyDictionary()


def step_graphs(mixture: Mixture) -> StepGraphs:
    """Return the graphs of a mixture."""
    with _lock:
        if mixture not in _every:
            _every[mixture] = StepGraphs(mixture)
        return _every[mixture]


def _shared_pool(device: torch.device) -> Any:
    """Return the memory of the graphs of a device; None if there is no graph, as it is freed with the last one."""
    captured = (own for graphs in _every.values() for own in graphs._graphs.values())
    return next((own.graph.pool for own in captured if own.device == device), None)


def _make_room() -> None:
    """Drop the graphs of mixtures that were not used lately, so that another graph can be captured."""
    while sum(map(len, _every.values())) >= MAX_ALL_GRAPHS:
        min((graphs for graphs in _every.values() if len(graphs)), key=lambda graphs: graphs.last_use).clear()


def capturable(mixture: Mixture, context: Context) -> bool:
    """Whether a step of a mixture is computed without any decision on the host."""
    if context.states[LM_LOGITS].device.type != "cuda" or mixture.layer.stateful or not mixture.weights.capturable:
        return False
    if context.spans or context.source_tokens is not None:
        return False
    return all(getattr(memory, "capturable", False) for memory in mixture.memories)


def _settings(mixture: Mixture) -> tuple[Any, ...]:
    """Return the objects that a graph was made with: another object may mean another prediction."""
    own: list[Any] = []
    for memory in mixture.memories:
        if isinstance(memory, NeighbourMemory):
            own += [memory.settings, getattr(memory, "store", None), getattr(memory, "index", None)]
    return (mixture.weights, mixture.end_odds, *mixture.memories, *own)


def _predict(mixture: Mixture, inputs: _Inputs) -> Tensor:
    return mixture.generation_log_probs(mixture.predict(inputs.context, all_components=False), inputs.outside)


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first | second


def _predict_on_cpu(mixture: Mixture, context: Context, left_out: Tensor | None) -> Tensor:
    """Return the log-probabilities of the mixture, and those of the language model alone at the (N,) left out."""
    if left_out is None or context.spans or not bool(left_out.any()):
        return _predict(mixture, _Inputs(context, left_out))
    log_probs = context.states[LM_LOGITS].float().log_softmax(-1)
    rows = (~left_out).nonzero()[:, 0]
    if len(rows):
        log_probs[rows] = _predict(mixture, _Inputs(context.select(rows), None)).to(log_probs)
    return log_probs


def _capture(mixture: Mixture, given: _Inputs) -> _Captured:
    """Capture a step that reads tensors like these."""
    _make_room()
    device = given.context.states[LM_LOGITS].device
    # Tensors of inference mode could not be written again outside of it.
    with torch.inference_mode(False), torch.no_grad(), collect_constants() as constants:
        inputs = given.copies()

        def step() -> list[Tensor]:
            with defer_checks() as checks:
                return [_predict(mixture, inputs), *checks.flags()]

        graph = capture_graph(step, device, pool=_shared_pool(device))
    return _Captured(inputs, graph, constants)
