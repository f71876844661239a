"""Windows: every token is scored once, with the context it was promised."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnlm.errors import ParameterError
from knnlm.lm.windows import Window, WindowShape, batches, windows


@given(st.lists(st.integers(0, 99), max_size=60), st.integers(1, 20), st.data())
def test_every_token_is_scored_once_with_the_tokens_right_before_it(document, context, data):
    stride = data.draw(st.integers(1, context))
    stream = [777, *document]
    scored = []
    for window in windows(document, WindowShape(context, stride), start_token=777, row=5):
        assert 1 <= len(window.tokens) <= context
        first = len(window.tokens) - len(window.targets)
        for offset, target in enumerate(window.targets):
            place = window.row - 5 + offset  # of the target in the document
            length = first + offset + 1
            assert list(window.tokens[:length]) == stream[place + 1 - length : place + 1]
            assert length == place + 1 or length > context - stride
            scored.append((place, target))
    assert scored == list(enumerate(document))


def test_reference_protocol_gives_1024_targets_then_512_each():
    made = list(windows(list(range(2000)), WindowShape(1024, 512), start_token=0))
    assert [len(window.targets) for window in made] == [1024, 512, 464]
    assert [len(window.tokens) for window in made] == [1024, 1024, 976]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 200))
def test_batches_hold_every_window_and_their_padding_fits_the_budget(lengths, budget):
    made = [Window([0] * length, 0, 0, 0, length, row) for row, length in enumerate(lengths)]
    packed = list(batches(made, budget))
    assert sorted(window.row for batch in packed for window in batch) == list(range(len(made)))
    for batch in packed:
        assert len(batch) == 1 or len(batch) * max(map(len, batch)) <= budget


@pytest.mark.parametrize(("context", "stride"), [(0, 1), (8, 0), (8, 9), (-1, 1)])
def test_impossible_windows_are_refused(context, stride):
    with pytest.raises(ParameterError, match="must be"):
        WindowShape(context, stride)


@pytest.mark.parametrize(
    ("modules", "needs_torch"),
    [(["lm.windows", "lm.fingerprint", "corpus", "io"], False), (["lm.key_layers", "lm.causal"], True)],
)
def test_transformers_is_not_imported_before_a_model_is_loaded(modules, needs_torch):
    imports = "; ".join(f"import knnlm.{module}" for module in modules)
    code = f"import sys; {imports}; print('transformers' in sys.modules, 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", str(needs_torch)]
