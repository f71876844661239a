"""The passes of a decoder's training: attention over packed rows, precision, loss and compiled blocks.

In bfloat16 the model runs with torch's autocast: matrices are multiplied in half precision, while weights, their
gradients and the residual stream are in float32. The logits and their gradients are in half precision.

Loss and gradients of a step are some thousand kernels. With the few tokens of a step on a small text, launching them
takes several times as long as running them, so that steps of one shape are captured as a CUDA graph.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from knnlm.errors import KnnlmWarning
from knnlm.lm.causal import dynamic_shape_attention, eval_mode
from knnlm.lm.compile import compiled_blocks
from knnlm.lm.cuda_graph import WARM_RUNS, CapturedGraph, capture_graph
from knnlm.lm.layers import layer_list
from knnlm.training.data import TrainingBatch
from knnlm.training.head_loss import RowPass, default_row_pass, head_loss
from knnlm.training.packed_attention import (
    MASK,
    VARLEN,
    boundaries,
    choose_attention,
    packed_attention,
    packed_inputs,
    supports_packing,
)
from knnlm.training.teacher import SparseTargets
from knnlm.training.trainer import Goal, Losses, distillation_loss

_PROBE = 8  # tokens
_LENGTH_MULTIPLE = 128  # of the longest window; a block of the kernel
_MAX_GRAPHS = 4  # of different shapes
_MAX_DROPS = 4  # for want of memory; after these, no more graphs are captured

Part = tuple[TrainingBatch, SparseTargets | None]


class PassInputs(NamedTuple):
    """What a pass reads, all on one device."""

    ids: Tensor  # (B, T)
    targets: Tensor  # (B·T,)
    position_ids: Tensor | None  # (B, T) of packed rows
    starts: Tensor | None  # where windows begin, see `boundaries`
    positions: Tensor | float  # that the losses are divided by
    sources: Tensor | None = None  # (B, S) tokens that an encoder reads; such passes are not captured
    source_mask: Tensor | None = None  # (B, S)

    @property
    def model_inputs(self) -> dict[str, Any]:
        """The arguments of the model."""
        if self.sources is None:
            return {"input_ids": self.ids, "use_cache": False}
        encoder = {"input_ids": self.sources, "attention_mask": self.source_mask}
        return {**encoder, "decoder_input_ids": self.ids, "use_cache": False}

    @property
    def tensors(self) -> list[Tensor]:
        """All but the number of positions."""
        return [tensor for tensor in self[:4] if tensor is not None]

    @property
    def shape(self) -> Hashable:
        """Equal for inputs that one graph can read."""
        return tuple(None if tensor is None else tensor.shape for tensor in self[:4])

    def copy_to(self, device: torch.device) -> PassInputs:
        """Return the same in tensors of their own."""
        copies: Any = [None if tensor is None else tensor.to(device, copy=True) for tensor in self[:4]]
        positions = torch.full((), float(self.positions), device=device)
        return PassInputs(copies[0], copies[1], copies[2], copies[3], positions)


class DecoderPass:
    """A model on its device, and how its losses and gradients are computed."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        precision: str,
        row_length: int | None,
        longest: int,
        captures: bool | None = None,
    ) -> None:
        """Take a model in float32. `row_length` is that of packed rows, None: rows are padded windows.

        `captures` is whether steps over packed rows are captured as CUDA graphs; None: on a GPU.
        """
        self.model, self.device = model, model.device
        self.attention = None if row_length is None else choose_attention(model, row_length, precision=precision)
        is_masked = self.attention == VARLEN and row_length is not None and supports_packing(model, row_length, MASK)
        self._longest = -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        self._head = plain_head(model)
        self._half = precision == "bfloat16"
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        if self.attention == VARLEN and not self._runs(VARLEN):
            self.attention = MASK if is_masked else None  # found in float32: half precision is too coarse
        self._row_pass: RowPass | None = None
        captures = self.device.type == "cuda" if captures is None else captures
        # Where dropout is drawn, every step is to have its own seed.
        self._graphs = PassGraphs(self) if captures and self.is_packed and not has_dropout(model) else None

    @property
    def is_packed(self) -> bool:
        """Whether the model can read packed rows."""
        return self.attention is not None

    def losses(self, batch: TrainingBatch, sparse: SparseTargets | None, *, beta: float, positions: int) -> Losses:
        """Return the losses of a batch, divided by this number of positions."""
        given = self._host_inputs(batch, positions)
        return self._losses(PassInputs(*map(self._to_device, given)), sparse, beta)

    @property
    def has_fixed_shape(self) -> bool:
        """Whether all steps should have the same number of rows."""
        return self._graphs is not None

    def gradients(self, parts: Sequence[Part], *, beta: float, positions: int) -> Tensor:
        """Compute the gradients of a step, and return the (4,) sums of its losses.

        The step is read in parts; its losses are divided by this number of positions.
        """
        if self._graphs is not None and len(parts) == 1 and parts[0][1] is None:
            found = self._graphs.run(self._host_inputs(parts[0][0], positions))
            if found is not None:
                return found
        sums = []
        for batch, sparse in parts:
            sums.append(add_gradients(self.losses(batch, sparse, beta=beta, positions=positions)))
        return torch.stack(sums).sum(0)

    def _host_inputs(self, batch: TrainingBatch, positions: int) -> PassInputs:
        starts = None
        if batch.position_ids is not None and self.attention == VARLEN:
            starts = boundaries(batch.position_ids)
            starts = starts.pin_memory() if self.device.type == "cuda" else starts
        pairs = batch.sources, batch.source_mask
        return PassInputs(batch.ids, batch.targets, batch.position_ids, starts, positions, *pairs)

    def _losses(self, given: PassInputs, sparse: SparseTargets | None, beta: float) -> Losses:
        targets = given.targets
        found = (None, None) if sparse is None else (self._to_device(sparse.ids), self._to_device(sparse.probs))
        inputs = given.model_inputs
        if given.position_ids is not None:
            inputs |= packed_inputs(given.position_ids, given.starts, self._longest)
        options: dict[str, Any] = {"beta": beta, "positions": given.positions}
        with self._kernels(), self._autocast():
            # Padding is on the right, so no mask is needed, and attention can use its fastest kernel.
            if self._head is None:
                logits = self.model(**inputs).logits  # (B, T, V)
                return distillation_loss(logits.flatten(0, 1), targets, *found, **options)
            hidden = self.model.base_model(**inputs)[0].flatten(0, 1)  # (N, D)
        hidden = hidden.bfloat16() if self._half else hidden
        return head_loss(
            hidden, self._head.weight, self._head.bias, targets, *found, **options, row_pass=self._row_pass
        )

    def drop_gradients(self) -> None:
        """Forget all gradients, also incomplete ones."""
        for weight in self.model.parameters():
            weight.grad = None

    def drop_graphs(self) -> bool:
        """Free the memory of captured steps, and return whether there were any."""
        return self._graphs is not None and self._graphs.drop()

    def finish(self) -> PreTrainedModel:
        """Return the model; no more passes can be run."""
        self._graphs = None
        return self.model

    @contextmanager
    def compiled(self, shape: tuple[int, int], *, backend: Any = "inductor") -> Iterator[None]:
        """Compile the blocks for batches of this (B, T), and the loss, until the context exits."""
        width = self.model.config.get_text_config().hidden_size
        plain = default_row_pass(torch.bfloat16 if self._half else torch.float32)
        fast = torch.compile(plain, dynamic=False, backend=backend)

        def row_pass(logits: Tensor, goal: Goal) -> tuple[Tensor, Tensor, Tensor]:
            if not status.failed:
                try:
                    return fast(logits, goal)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # as in blocks, errors of the compilers have no common root
                    status.report(error)
            return plain(logits, goal)

        with compiled_blocks(list(layer_list(self.model)), width, shape, training=True, backend=backend) as status:
            self._row_pass = row_pass
            try:
                yield
            finally:
                self._row_pass = None

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(packed_attention(self.model, self.attention))
            if not self.is_packed:
                stack.enter_context(dynamic_shape_attention(self.device))
            yield

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self._half else nullcontext()

    def _to_device(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

    def _runs(self, attention: str | None) -> bool:
        """Whether a pass with gradients works."""
        ids = torch.full((1, _PROBE), 3, device=self.device)
        positions = torch.arange(_PROBE, device=self.device)[None]
        try:
            with eval_mode(self.model), packed_attention(self.model, attention), self._autocast():
                starts = boundaries(positions) if attention == VARLEN else None
                inputs = {} if attention is None else packed_inputs(positions, starts, self._longest)
                self.model.base_model(input_ids=ids, use_cache=False, **inputs)[0].float().sum().backward()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of any family; they have no common base class
            return False
        finally:
            self.drop_gradients()
        return True


class PassGraphs:
    """The gradients of steps as CUDA graphs, one for each shape."""

    def __init__(self, passes: DecoderPass) -> None:
        self._passes = passes
        self._graphs: dict[Hashable, tuple[PassInputs, CapturedGraph]] = {}
        self._runs: Counter[Hashable] = Counter()
        self._works = True
        self._drops = 0

    def run(self, given: PassInputs) -> Tensor | None:
        """Set the gradients of a step, and return the (4,) sums of its losses; None: without a graph."""
        shape = given.shape
        if shape not in self._graphs and not self._capture(given, shape):
            return None
        read, graph = self._graphs[shape]
        for tensor, value in zip(read.tensors, given.tensors, strict=True):
            tensor.copy_(value, non_blocking=True)
        assert isinstance(read.positions, Tensor)
        read.positions.fill_(given.positions)
        graph.replay()
        sums, *gradients = graph.written
        for weight, gradient in zip(self._passes.weights.values(), gradients, strict=True):
            weight.grad = gradient
        return sums.clone()  # the graph writes it again at the next step

    def drop(self) -> bool:
        """Free all graphs, and return whether there were any; they are captured again a few times."""
        had_any = bool(self._graphs)
        self._graphs.clear()
        self._runs.clear()
        self._drops += had_any
        self._works = self._works and self._drops < _MAX_DROPS
        return had_any

    def _capture(self, given: PassInputs, shape: Hashable) -> bool:
        """Whether a step of this shape was captured now: after some steps, and while there are few graphs."""
        self._runs[shape] += 1
        if not self._works or self._runs[shape] <= WARM_RUNS or len(self._graphs) >= _MAX_GRAPHS:
            return False
        passes, device = self._passes, self._passes.device
        read = given.copy_to(device)

        def step() -> list[Tensor]:
            passes.drop_gradients()  # new ones are made, in the memory of the graph
            sums = add_gradients(passes._losses(read, None, 0.0))
            gradients = [weight.grad for weight in passes.weights.values()]
            passes.drop_gradients()
            return [sums, *(gradient for gradient in gradients if gradient is not None)]

        if device.type == "cuda":
            torch.cuda.empty_cache()  # the graph has memory of its own
        try:
            pool = next((graph.pool for _, graph in self._graphs.values()), None)
            captured = capture_graph(step, device, pool=pool, rehearse=True)
            if len(captured.written) != 1 + len(passes.weights):
                raise RuntimeError("some weights have no gradient")
        except RuntimeError as error:
            self._works = False
            passes.drop_gradients()
            if not isinstance(error, torch.OutOfMemoryError):
                warnings.warn(
                    f"The steps of the training cannot be captured into a CUDA graph ({error}). They are slower "
                    "without.",
                    KnnlmWarning,
                    stacklevel=2,
                )
            return False
        self._graphs[shape] = read, captured
        return True


def add_gradients(losses: Losses) -> Tensor:
    """Add the gradients of losses to those of the weights, and return the (4,) losses."""
    losses.total.backward()
    return torch.stack([loss.detach().float() for loss in losses])


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether a model in training draws random numbers."""
    settings = model.config.get_text_config().to_dict()
    named = [value for name, value in settings.items() if "drop" in name and isinstance(value, (int, float))]
    layers = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(value > 0 for value in (*named, *layers))


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the linear layer that makes the logits of hidden states; None if something else happens to them too."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    ids = torch.arange(3, 3 + _PROBE, device=model.device)[None]
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.no_grad(), eval_mode(model):
        try:
            logits = model(**inputs).logits
            found = linear(model.base_model(**inputs)[0], head.weight, head.bias)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return None
    return head if found.shape == logits.shape and torch.equal(found, logits) else None


def split_rows(
    batch: TrainingBatch, sparse: SparseTargets | None, rows: int
) -> Sequence[tuple[TrainingBatch, SparseTargets | None]]:
    """Return a batch in parts of at most this number of rows."""
    count, length = batch.ids.shape
    parts = []
    for begin in range(0, count, rows):
        flat = slice(begin * length, (begin + rows) * length)
        own = None if sparse is None else SparseTargets(sparse.ids[flat], sparse.probs[flat], sparse.lengths[flat])
        parts.append((batch.rows(begin, begin + rows), own))
    return parts
