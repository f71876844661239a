"""Training data: token windows of documents for decoders, (key, value) entries of a store for output matrices.

Documents are kept apart: a window never reaches into the next document. Windows are read padded, in groups of similar
length, or packed: several windows in a row of fixed length, with positions that begin at 0 in each window. The order of
windows and entries, and where long documents are cut, differ between epochs but depend only on the seed and the epoch,
so a run that was stopped can resume anywhere.

Documents that are targets of pairs have their sources beside them; each window is read with the whole source.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnlm.datastore.store import Datastore
from knnlm.errors import ParameterError
from knnlm.lm.windows import WindowShape, source_of
from knnlm.training.trainer import MIN_DOCUMENTS, select_held_out

_TOKENS_PER_READ = 1 << 20
_MIN_TOKENS_FOR_FOUR_GROUPS = 8_192  # smaller steps have two groups
_SOURCES_PER_READ = 4096  # that are tokenised at once
_KEYS_PER_READ = 2048
_SHUFFLE_BUFFER = 1 << 17  # keys that are shuffled together; bounds the memory
_STATISTICS_SAMPLE = 1 << 15  # keys from which the mean and the standard deviation are estimated
_MAX_HELD_OUT_TOKENS = 1 << 16  # more would only make the evaluation slower
_MIN_HELD_OUT_SPAN = 64  # tokens of one document

_Window = tuple[int, int, int, int]


@dataclass(frozen=True)
class TokenStream:
    """The tokens of documents, concatenated."""

    tokens: NDArray[np.int32]  # (N,)
    starts: NDArray[np.int64]  # (documents + 1,) the first position of each document, and the end of the last
    sources: TokenStream | None = None  # the source of each document; None: they are no pairs

    @classmethod
    def from_store(
        cls, store: Datastore, encode_sources: Callable[[Sequence[str]], Sequence[Sequence[int]]] | None = None
    ) -> TokenStream:
        """Read all tokens of a store; row i of the store is token i. `encode_sources` reads those of pairs."""
        found = [(own.first_entry, own.source_text or "") for own in store.documents() if own.entries]
        starts, texts = [first for first, _ in found], [text for _, text in found]
        sources = None
        if store.has_pairs and encode_sources is not None:
            begins = range(0, len(texts), _SOURCES_PER_READ)
            encoded = (encode_sources(texts[begin : begin + _SOURCES_PER_READ]) for begin in begins)
            sources = cls._concatenate(np.asarray(source, np.int32) for some in encoded for source in some)
        return cls(stored_tokens(store), np.array([*starts, store.entry_count], dtype=np.int64), sources)

    @classmethod
    def from_documents(cls, documents: Iterable[Sequence[int]]) -> TokenStream:
        """Concatenate the tokens of documents; empty documents are skipped."""
        documents = [document for document in documents if len(document)]
        read = cls._concatenate(np.asarray(document, dtype=np.int32) for document in documents)
        sources: Any = [source_of(document) for document in documents]
        if not sources or None in sources:
            return read
        return replace(read, sources=cls._concatenate(np.asarray(source, dtype=np.int32) for source in sources))

    @classmethod
    def _concatenate(cls, documents: Iterable[NDArray[np.int32]]) -> TokenStream:
        arrays = list(documents)
        starts = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate(arrays) if arrays else np.zeros(0, np.int32), starts)

    def __add__(self, other: TokenStream) -> TokenStream:
        """Return the documents of both."""
        starts = np.concatenate([self.starts[:-1], other.starts + len(self.tokens)])
        sources = None if self.sources is None or other.sources is None else self.sources + other.sources
        return TokenStream(np.concatenate([self.tokens, other.tokens]), starts, sources)

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens."""
        return tokens_hash(self.tokens)

    @property
    def boundaries_fingerprint(self) -> str:
        """Hash of the document boundaries."""
        return hashlib.sha256(self.starts.astype("<i8").tobytes()).hexdigest()[:16]

    @property
    def sources_fingerprint(self) -> str | None:
        """Hashes of the sources; None without any."""
        if self.sources is None:
            return None
        return f"{self.sources.fingerprint} {self.sources.boundaries_fingerprint}"


def stored_tokens(store: Datastore) -> NDArray[np.int32]:
    """Return the (N,) tokens of a store."""
    tokens = np.empty(store.entry_count, dtype=np.int32)
    for begin in range(0, store.entry_count, _TOKENS_PER_READ):
        rows = torch.arange(begin, min(begin + _TOKENS_PER_READ, store.entry_count))
        tokens[begin : begin + len(rows)] = store.values(rows).numpy()
    return tokens


def tokens_hash(tokens: NDArray[np.int32]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of tokens."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").data).hexdigest()[:16]


@dataclass(frozen=True)
class TrainingBatch:
    """Padded windows, one in a row, or packed ones; N = B·T, row-major."""

    ids: Tensor  # (B, T) input tokens
    targets: Tensor  # (N,) next tokens; -1 where the position does not count
    positions: Tensor  # (N,) positions of the targets in the token stream; -1 where they do not count
    position_ids: Tensor | None = None  # (B, T) positions in the windows of packed rows; padding has its own windows
    sources: Tensor | None = None  # (B, S) tokens that an encoder reads, padded on the right
    source_mask: Tensor | None = None  # (B, S) 0 at padding

    def rows(self, begin: int, end: int) -> TrainingBatch:
        """Return some of the rows."""
        flat = slice(begin * self.ids.shape[1], end * self.ids.shape[1])
        return self._with_rows(slice(begin, end), self.ids[begin:end], flat)

    def columns(self, end: int) -> TrainingBatch:
        """Return the beginning of the first row."""
        end = min(end, self.ids.shape[1])
        first = self._with_rows(slice(0, 1), self.ids[:1, :end], slice(0, end))
        restarts = first.position_ids
        return first if restarts is None else replace(first, position_ids=restarts[:, :end])

    def _with_rows(self, rows: slice, ids: Tensor, flat: slice) -> TrainingBatch:
        by_row = (self.position_ids, self.sources, self.source_mask)
        chosen = (None if tensor is None else tensor[rows] for tensor in by_row)
        return TrainingBatch(ids, self.targets[flat], self.positions[flat], *chosen)

    def pin_memory(self) -> TrainingBatch:
        """Return a copy in page-locked memory, from which copies to a GPU do not block."""
        by_row = (self.position_ids, self.sources, self.source_mask)
        pinned = (None if tensor is None else tensor.pin_memory() for tensor in by_row)
        return TrainingBatch(self.ids.pin_memory(), self.targets.pin_memory(), self.positions, *pinned)


class TrainingBatches:
    """The windows of a text: which are trained on, which are held out, and the steps they are grouped into.

    Windows are (W, 4) integers: the document's first position in the stream, and the window's begin, first scored
    position and end within the document.
    """

    def __init__(
        self,
        text: TokenStream,
        shape: WindowShape,
        *,
        start_token: int,
        held_out: float,
        seed: int,
        held_out_text: TokenStream | None = None,
        packed: bool = False,
        prefix: Sequence[int] = (),
    ) -> None:
        """Hold out a share of the text, or another text instead. `packed` puts several windows in a row.

        `prefix` are the tokens that a decoder reads before the start token of a target.
        """
        self.text, self.packed, self._shape, self._start_token, self._seed = text, packed, shape, start_token, seed
        self._text, self._prefix = text, list(prefix)  # the former with the held-out text
        table = self._table_of(text)
        held = self._mark_held_out(held_out if held_out_text is None else 0.0, table)
        self.held_out = table[held]
        self.is_held_out_apart = held_out_text is not None  # it has no targets
        if held_out_text is not None:
            self._text = text + held_out_text
            self.held_out = self._table_of(held_out_text)
            self.held_out[:, 0] += len(text.tokens)
        self._short, self._long = self._split_by_length(table[~held])
        self.longest = max(map(_max_length, (part for part in (table, self.held_out) if len(part))), default=0)
        self.tokens = count_targets(table[~held])  # trained on in each epoch
        if not self.tokens:
            raise ParameterError("There is no text to train on. Give more text, or hold less of it out.")

    def _table_of(self, text: TokenStream) -> NDArray[np.int64]:
        """Return the windows of whole documents."""
        borders = zip(text.starts[:-1].tolist(), text.starts[1:].tolist(), strict=True)
        context = self._shape.context
        return _table([cut for start, end in borders for cut in self._cut(start, 0, end - start, context)])

    def windows(self, epoch: int) -> NDArray[np.int64]:
        """Return the training windows of an epoch; long documents are cut at different places in each epoch."""
        context, stride = self._shape.context, self._shape.stride
        cuts: list[_Window] = []
        for document, start, begin, end in self._long:
            first = int(np.random.default_rng([self._seed, epoch, document]).integers(1, context + 1))
            # A span after held-out text reads the text before it, which leaves room for fewer scored positions.
            cuts += self._cut(start, begin, end, first if not begin else 1 + (first - 1) % stride)
        return np.concatenate([self._short, _table(cuts)])

    def steps(self, epoch: int, batch_tokens: int) -> list[list[NDArray[np.int64]]]:
        """Return the windows of an epoch in steps of about `batch_tokens`.

        A step is a few groups of windows of similar length, or, if packed, rows of windows.
        """
        random = np.random.default_rng([self._seed, epoch])
        if self.packed:
            rows = self._pack_rows(random.permutation(self.windows(epoch)), batch_tokens)
            return self._split_rows([rows[place] for place in random.permutation(len(rows))], batch_tokens)
        packed = self._pack(random.permutation(self.windows(epoch)), batch_tokens, random)
        # Interleave long and short groups, so that every step has several lengths.
        kinds = [random.permutation(kind) for kind in np.array_split(np.arange(len(packed)), _groups(batch_tokens))]
        turns = [number for turn in itertools.zip_longest(*kinds) for number in turn if number is not None]
        groups = [packed[number] for number in turns]
        sizes = np.array([int((group[:, 3] - group[:, 1]).sum()) for group in groups])
        total = int(sizes.sum())
        # All steps have similar sizes, so the last one is not a remainder: a group goes where its middle lies.
        count = max(1, (2 * total + batch_tokens) // (2 * batch_tokens))
        places = (2 * np.cumsum(sizes) - sizes) * count // (2 * total)
        borders = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(groups)]
        return [groups[begin:end] for begin, end in itertools.pairwise(borders)]

    def held_out_groups(self, batch_tokens: int) -> list[NDArray[np.int64]]:
        """Return the held-out windows in groups of similar length."""
        return self._pack(self.held_out, batch_tokens)

    def held_out_steps(self, batch_tokens: int) -> list[list[NDArray[np.int64]]]:
        """Return the held-out windows in what is read at once: a group of windows, or rows of them."""
        if self.packed:
            return self._split_rows(self._pack_rows(self.held_out, batch_tokens), batch_tokens)
        return [[group] for group in self.held_out_groups(batch_tokens)]

    def row_length(self, batch_tokens: int) -> int:
        """Return the length of packed rows: that of the longest window, or the context if a step has room for it."""
        return max(self.longest, min(self._shape.context, batch_tokens))

    def rows_per_step(self, batch_tokens: int) -> int:
        """Return the maximal number of packed rows of a step."""
        return max(1, batch_tokens // self.row_length(batch_tokens))

    def read_rows(self, rows: Sequence[NDArray[np.int64]], length: int, *, count: int | None = None) -> TrainingBatch:
        """Return the tokens of packed rows; what remains of a row is padded on the right, and so are missing rows."""
        rows = [*rows, *([_table([])] * ((count or 0) - len(rows)))]
        windows = np.concatenate(rows)
        first, begin, scored, end = windows.T
        sizes = end - begin
        # Where each window begins in the flat (N,) rows.
        ends = np.cumsum(sizes)
        used = np.array([int((row[:, 3] - row[:, 1]).sum()) for row in rows])
        skipped = np.repeat(np.cumsum([0, *(length - used[:-1])]), [len(row) for row in rows])
        places = np.repeat(ends - sizes + skipped, sizes)  # (n,) of the window of each token
        offsets = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)  # within its window
        flat, local = places + offsets, np.repeat(begin, sizes) + offsets
        numbers = np.repeat(first, sizes) + local  # in the stream
        shape = len(rows) * length
        ids = np.full(shape, self._start_token, dtype=np.int64)
        targets, positions = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        inside = local > 0  # the first token of a document follows the start token
        ids[flat[inside]] = self._text.tokens[numbers[inside] - 1]
        counted = local >= np.repeat(scored, sizes)
        targets[flat[counted]] = self._text.tokens[numbers[counted]]
        positions[flat[counted]] = numbers[counted]
        # Padding is cut like windows: attention kernels compute no more positions of one than the longest window has.
        padding = np.maximum(np.tile(np.arange(length), (len(rows), 1)) - used[:, None], 0)
        restarts = (padding % self.longest).reshape(-1)
        restarts[flat] = offsets
        grid = len(rows), length
        return TrainingBatch(
            torch.from_numpy(ids).view(grid),
            torch.from_numpy(targets),
            torch.from_numpy(positions),
            torch.from_numpy(restarts).view(grid),
        )

    def read(self, windows: NDArray[np.int64]) -> TrainingBatch:
        """Return the tokens of windows, padded on the right, where no earlier position attends to."""
        before = np.where(windows[:, 1] > 0, 0, len(self._prefix))  # tokens of each window that are no part of the text
        shape = len(windows), int((windows[:, 3] - windows[:, 1] + before).max())
        ids = np.full(shape, self._start_token, dtype=np.int64)
        targets, positions = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        for row, (first, begin, scored, end) in enumerate(windows.tolist()):
            skipped = int(before[row])
            ids[row, :skipped] = self._prefix[:skipped]
            known = max(1, begin)  # the first token of a document follows the start token
            shift = skipped - begin
            ids[row, known + shift : end + shift] = self._text.tokens[first + known - 1 : first + end - 1]
            counted = slice(scored + shift, end + shift)
            targets[row, counted] = self._text.tokens[first + scored : first + end]
            positions[row, counted] = np.arange(first + scored, first + end)
        sources, source_mask = self._read_sources(windows)
        return TrainingBatch(
            torch.from_numpy(ids),
            torch.from_numpy(targets).reshape(-1),
            torch.from_numpy(positions).reshape(-1),
            sources=sources,
            source_mask=source_mask,
        )

    def join_groups(self, groups: Sequence[NDArray[np.int64]], max_positions: int) -> list[NDArray[np.int64]]:
        """Concatenate groups, the longest windows first, while they have at most `max_positions` including padding."""
        joined: list[NDArray[np.int64]] = []
        for group in sorted(groups, key=lambda windows: int(self.lengths(windows).max()), reverse=True):
            both = np.concatenate([joined[-1], group]) if joined else group
            if joined and len(both) * self._padded_length(both) <= max_positions:
                joined[-1] = both
            else:
                joined.append(group)
        return joined

    def _padded_length(self, windows: NDArray[np.int64]) -> int:
        """Return how many positions each of some windows has in a batch of them, with those of its source."""
        targets = windows[:, 3] - windows[:, 1]
        return int(targets.max() + (self.lengths(windows) - targets).max())

    def lengths(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the (W,) numbers of tokens that are read of windows: those of the sources count too."""
        sizes: NDArray[np.int64] = windows[:, 3] - windows[:, 1]
        if self._text.sources is None:
            return sizes
        begins, ends = self._source_borders(self._text.sources, windows)
        return sizes + ends - begins

    def _source_borders(
        self, sources: TokenStream, windows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the source of each of (W,) windows begins and ends."""
        documents = np.searchsorted(self._text.starts, windows[:, 0])
        return sources.starts[documents], sources.starts[documents + 1]

    def _read_sources(self, windows: NDArray[np.int64]) -> tuple[Tensor | None, Tensor | None]:
        """Return the (B, S) tokens of the sources of windows, padded on the right, and their mask; None without any."""
        every = self._text.sources
        if every is None:
            return None, None
        begins, ends = self._source_borders(every, windows)
        lengths = ends - begins
        ids = np.zeros((len(windows), lengths.max()), dtype=np.int64)  # any token: the mask hides it
        for row, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            ids[row, :length] = every.tokens[begin : begin + length]
        mask = np.arange(ids.shape[1]) < lengths[:, None]
        return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))

    def _cut(self, start: int, begin: int, end: int, first: int) -> Iterator[_Window]:
        """Cut a span of the document at `start`; the first window scores `first` positions, the others `stride`."""
        back, scored, until = self._shape.context - self._shape.stride, begin, min(begin + first, end)
        while scored < end:
            yield start, max(0, scored - back), scored, until
            scored, until = until, min(until + self._shape.stride, end)

    def _split_by_length(self, table: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[_Window]]:
        """Return the windows of short spans, and the long spans (document, start, begin, end) to cut in each epoch."""
        documents = np.searchsorted(self.text.starts, table[:, 0]).tolist()
        spans: list[list[int]] = []
        for document, (start, _, scored, end) in zip(documents, table.tolist(), strict=True):
            if spans and spans[-1][0] == document and spans[-1][3] == scored:
                spans[-1][3] = end
            else:
                spans.append([document, start, scored, end])
        short: list[_Window] = []
        long: list[_Window] = []
        for document, start, begin, end in spans:
            limit = self._shape.stride if begin else self._shape.context
            if end - begin <= limit:
                short += self._cut(start, begin, end, limit)
            else:
                long.append((document, start, begin, end))
        return _table(short), long

    def _pack(
        self, windows: NDArray[np.int64], batch_tokens: int, random: np.random.Generator | None = None
    ) -> list[NDArray[np.int64]]:
        """Group windows by length, otherwise in their order; a group is a fraction of a step, or a single window."""
        sizes = self.lengths(windows)
        order = np.argsort(-sizes, kind="stable")
        windows, lengths = windows[order], sizes[order].tolist()
        share = batch_tokens // _groups(batch_tokens)
        packed, begin = [], 0
        while begin < len(windows):
            count = max(1, share // lengths[begin])
            if random is not None and not begin:
                count = int(random.integers(1, count + 1))  # shifts all groups, so they differ between epochs
            packed.append(windows[begin : begin + count])
            begin += count
        return packed

    def _pack_rows(self, windows: NDArray[np.int64], batch_tokens: int) -> list[NDArray[np.int64]]:
        places = pack_rows((windows[:, 3] - windows[:, 1]).tolist(), self.row_length(batch_tokens))
        return [windows[place] for place in places]

    def _split_rows(self, rows: list[NDArray[np.int64]], batch_tokens: int) -> list[list[NDArray[np.int64]]]:
        """Split rows into steps of similar numbers of rows."""
        count = -(-len(rows) // self.rows_per_step(batch_tokens))
        borders = np.linspace(0, len(rows), count + 1).round().astype(int).tolist()
        return [rows[begin:end] for begin, end in itertools.pairwise(borders)]

    def _mark_held_out(self, share: float, table: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark the held-out windows: whole documents, or windows if there are few, ordered by the hash of their tokens.

        Copies of a text are held out together.
        """
        wanted = share * len(self.text.tokens)
        marked = np.zeros(len(table), dtype=bool)
        if not wanted:
            return marked
        whole = len(self.text.starts) - 1 >= MIN_DOCUMENTS
        ends = dict(zip(self.text.starts[:-1].tolist(), self.text.starts[1:].tolist(), strict=True))
        members: dict[bytes, list[int]] = {}
        digests: dict[tuple[int, int], bytes] = {}
        for number, (first, _, scored, end) in enumerate(table.tolist()):
            span = (first, ends[first]) if whole else (first + scored, first + end)
            if span not in digests:
                tokens = np.ascontiguousarray(self.text.tokens[slice(*span)])
                digests[span] = hashlib.sha256(f"{self._seed} ".encode() + tokens.tobytes()).digest()
            members.setdefault(digests[span], []).append(number)
        groups = [numbers for _, numbers in sorted(members.items())]
        # One document may be most of the text, and what is held out is lost to training.
        largest = max(2 * wanted, len(self.text.tokens) / MIN_DOCUMENTS)
        for chosen in select_held_out((count_targets(table[group]) for group in groups), wanted, max_size=largest):
            marked[groups[chosen]] = True
        return marked


def pack_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return the numbers of the items in each row: the longest first, each in the fullest row with room for it."""
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(row_length + 1)]  # rows by the room that is left in them
    rooms = 0  # bit r is set if there is a row with room r
    for number in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[number]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(number)
        by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


def count_targets(windows: NDArray[np.int64]) -> int:
    """Return the number of scored positions of windows."""
    return int((windows[:, 3] - windows[:, 2]).sum())


def _groups(batch_tokens: int) -> int:
    return 4 if batch_tokens >= _MIN_TOKENS_FOR_FOUR_GROUPS else 2  # smaller groups would not keep a GPU busy


def _max_length(windows: NDArray[np.int64]) -> int:
    return int((windows[:, 3] - windows[:, 1]).max())


def _table(windows: list[_Window]) -> NDArray[np.int64]:
    return np.array(windows, dtype=np.int64).reshape(-1, 4)


class EntryBatches:
    """The entries of a store in shuffled batches, some held out, with standardised keys.

    Blocks of keys are shuffled, collected in a buffer and shuffled within it, so the memory is bounded by the buffer.
    """

    def __init__(
        self,
        store: Datastore,
        *,
        held_out: float,
        seed: int,
        whole_vocabulary: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.store, self.seed, self.device, self.dtype = store, seed, device, dtype
        held_out_tokens = mark_held_out_tokens(store, held_out, seed=seed)
        self.is_held_out = np.zeros(store.key_count, dtype=bool)
        self.counts = np.zeros(store.model["vocab_size"], dtype=np.int64)  # occurrences of each token in training
        present = np.full(len(self.counts), whole_vocabulary)
        for begin in range(0, store.key_count, _SHUFFLE_BUFFER):
            rows = store.entries_of(torch.arange(begin, min(begin + _SHUFFLE_BUFFER, store.key_count)))
            values, held = store.values(rows).numpy(), held_out_tokens[rows.numpy()]
            self.is_held_out[begin : begin + len(rows)] = held
            present[values] = True
            self.counts += np.bincount(values[~held], minlength=len(self.counts))
        self.words = torch.from_numpy(np.flatnonzero(present))  # (W,)
        self.held_out = torch.from_numpy(np.flatnonzero(self.is_held_out))
        self.count = store.key_count - len(self.held_out)
        if not self.count:
            raise ParameterError(
                f"{store.path}: all of its text would be held out. Give more text, or hold nothing out with held_out=0 "
                "(--held-out 0)."
            )
        self.mean, self.std = self._measure()
        self._resident = self._load_keys() if device.type == "cuda" else None

    def keys(self, ids: Tensor) -> Tensor:
        """Return these (n, D) keys, standardised, on the device."""
        if self._resident is not None:
            return self._resident[ids.to(self.device)]
        return self._standardise(self.store.take(ids))

    def columns(self, ids: Tensor) -> Tensor:
        """Return the (n,) places of these keys' tokens among the words."""
        return torch.searchsorted(self.words, self.store.values(self.store.entries_of(ids))).to(self.device)

    def batches(self, epoch: int, size: int, *, skip: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (ids, keys, columns) of every training entry once, without the first `skip` batches."""
        random = np.random.default_rng([self.seed, epoch])
        blocks = random.permutation(-(-self.store.key_count // _KEYS_PER_READ))
        per_buffer = _SHUFFLE_BUFFER // _KEYS_PER_READ
        for begin in range(0, len(blocks), per_buffer):
            starts = np.sort(blocks[begin : begin + per_buffer]) * _KEYS_PER_READ
            ids = (starts[:, None] + np.arange(_KEYS_PER_READ)).reshape(-1)
            ids = ids[ids < self.store.key_count]
            ids = ids[~self.is_held_out[ids]]
            # Batches have similar sizes: a last batch of a few entries would be a full step with a noisy gradient.
            parts = np.array_split(random.permutation(len(ids)), max(1, round(len(ids) / size))) if len(ids) else []
            if skip >= len(parts):
                skip -= len(parts)
                continue
            buffered = torch.from_numpy(ids)
            keys, columns = self.keys(buffered), self.columns(buffered)
            for part in map(torch.from_numpy, parts[skip:]):
                on_device = part.to(self.device)
                yield buffered[part], keys[on_device], columns[on_device]
            skip = 0

    def _measure(self) -> tuple[Tensor, Tensor]:
        """Return the (D,) mean and standard deviation of a sample of the training keys."""
        train = np.flatnonzero(~self.is_held_out)
        if len(train) > _STATISTICS_SAMPLE:
            train = np.sort(np.random.default_rng([self.seed]).choice(train, _STATISTICS_SAMPLE, replace=False))
        sample = self.store.take(torch.from_numpy(train)).double()
        std = sample.std(0, correction=0)
        # A nearly constant dimension carries no information and must not be scaled up.
        std = std.clamp(min=1e-3 * float(std.mean()) or 1.0)
        return sample.mean(0).float(), std.float()

    def _standardise(self, keys: Tensor) -> Tensor:
        return ((keys - self.mean) / self.std).to(self.device, self.dtype)

    def _load_keys(self) -> Tensor | None:
        """Return all keys on the GPU, None if they need more than half of its free memory."""
        shape = (self.store.key_count, self.store.width)
        if math.prod(shape) * self.dtype.itemsize > torch.cuda.mem_get_info(self.device)[0] // 2:
            return None
        keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        for first, chunk in self.store.chunks(_KEYS_PER_READ * 8):
            keys[first : first + len(chunk)] = self._standardise(chunk)
        return keys


def mark_held_out_tokens(store: Datastore, share: float, *, seed: int) -> NDArray[np.bool_]:
    """Return which of the (N,) tokens are held out: whole documents, ordered by the hash of their text.

    With few documents, or too few that are short enough, documents are cut into spans, so that a store of one book can
    be trained on and evaluated.
    """
    wanted = min(share * store.entry_count, _MAX_HELD_OUT_TOKENS)
    if not wanted:
        return np.zeros(store.entry_count, dtype=bool)
    texts = {document.sha256 for document in store.documents() if document.entries}
    if len(texts) >= MIN_DOCUMENTS:
        # One document may be most of the text, and what is held out is lost to training.
        largest = min(max(wanted, store.entry_count / MIN_DOCUMENTS), _MAX_HELD_OUT_TOKENS)
        marked = _mark_spans(store, wanted, seed, length=store.entry_count, largest=largest)
        if marked.sum() >= wanted:
            return marked
    length = max(_MIN_HELD_OUT_SPAN, int(wanted) // 2)
    return _mark_spans(store, wanted, seed, length=length, largest=store.entry_count)


def _mark_spans(store: Datastore, wanted: float, seed: int, *, length: int, largest: float) -> NDArray[np.bool_]:
    """Mark spans of at most `length` tokens until `wanted` tokens are marked; equal texts are marked together."""
    spans: dict[bytes, list[slice]] = {}
    for document in store.documents():
        for begin in range(0, document.entries, length):
            digest = hashlib.sha256(f"{seed} {document.sha256} {begin}".encode()).digest()
            first = document.first_entry + begin
            spans.setdefault(digest, []).append(slice(first, first + min(length, document.entries - begin)))
    groups = [group for _, group in sorted(spans.items())]
    marked = np.zeros(store.entry_count, dtype=bool)
    sizes = (sum(span.stop - span.start for span in group) for group in groups)
    for chosen in select_held_out(sizes, wanted, max_size=largest):
        for span in groups[chosen]:
            marked[span] = True
    return marked
