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
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from knnlm.errors import KnnlmWarning
from knnlm.index.gpu.deferred import check_flag, defer_checks
from knnlm.lm.cuda_graph import WARM_RUNS, CapturedGraph, capture_graph
from knnlm.memories.base import LM_LOGITS, Context, Positions
from knnlm.memories.voting import NeighbourMemory
from knnlm.mixture.mixture import Mixture

MAX_GRAPHS = 8  # of different shapes


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


class StepGraphs:
    """The graphs of a mixture, as long as its weights and settings stay the same."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = ref(mixture)  # which owns this object
        self._graphs: dict[Hashable, _Captured] = {}
        self._steps: Counter[Hashable] = Counter()
        self._settings: tuple[Any, ...] = ()
        self._works = True

    def predict(self, context: Context, outside: Tensor | None = None) -> Tensor:
        """Return the (N, V) log-probabilities of the tokens that follow N positions."""
        mixture = self._mixture()
        assert mixture is not None
        inputs = _Inputs(context, outside)
        captured = self._captured(mixture, inputs)
        if captured is None:
            return _predict(mixture, inputs)
        for name, tensor in captured.inputs.tensors.items():
            tensor.copy_(inputs.tensors[name])
        captured.graph.replay()
        output, *flags = captured.graph.written
        if any(check_flag(flag) for flag in flags):
            return _predict(mixture, inputs)
        return output.clone()

    def _captured(self, mixture: Mixture, inputs: _Inputs) -> _Captured | None:
        """Return the graph of such inputs, captured now if enough such steps were taken; None: there is none yet."""
        if not self._works or not capturable(mixture, inputs.context):
            return None
        settings = _settings(mixture)
        if len(settings) != len(self._settings) or any(
            a is not b for a, b in zip(settings, self._settings, strict=True)
        ):
            self._graphs, self._steps, self._settings = {}, Counter(), settings
        shape = inputs.shape
        if shape not in self._graphs:
            self._steps[shape] += 1
            if self._steps[shape] <= WARM_RUNS or len(self._graphs) >= MAX_GRAPHS:
                return None
            try:
                self._graphs[shape] = _capture(mixture, inputs.copies())
            except RuntimeError as error:
                self._works = False
                warnings.warn(
                    f"A step of generation cannot be captured into a CUDA graph ({error}). It is slower without.",
                    KnnlmWarning,
                    stacklevel=2,
                )
        return self._graphs.get(shape)


_every: WeakKeyDictionary[Mixture, StepGraphs] = WeakKeyDictionary()


def step_graphs(mixture: Mixture) -> StepGraphs:
    """Return the graphs of a mixture."""
    if mixture not in _every:
        _every[mixture] = StepGraphs(mixture)
    return _every[mixture]


def capturable(mixture: Mixture, context: Context) -> bool:
    """Whether a step of a mixture is computed without any decision on the host."""
    if context.states[LM_LOGITS].device.type != "cuda" or mixture.layer.stateful or mixture.weights.skips_searches:
        return False
    if context.spans or context.source_tokens is not None:
        return False
    return all(getattr(memory, "capturable", False) for memory in mixture.memories)


def _settings(mixture: Mixture) -> tuple[Any, ...]:
    """Return the objects that a graph was made with: another object may mean another prediction."""
    own = [memory.settings for memory in mixture.memories if isinstance(memory, NeighbourMemory)]
    return (mixture.weights, *mixture.memories, *own)


def _predict(mixture: Mixture, inputs: _Inputs) -> Tensor:
    mixed = mixture.predict(inputs.context, all_components=False)
    return (mixed if inputs.outside is None else mixed.without_memories(inputs.outside)).log_probs()


def _capture(mixture: Mixture, inputs: _Inputs) -> _Captured:
    """Capture a step that reads these tensors."""

    def step() -> list[Tensor]:
        with torch.no_grad(), defer_checks() as checks:
            return [_predict(mixture, inputs), *checks.flags()]

    return _Captured(inputs, capture_graph(step))
