# Everything runs in .venv, which the first target makes. TORCH=torch==2.13.0 chooses a release.
PYTHON ?= python3
TORCH ?= torch>=2.11
VENV := .venv
RUN := $(VENV)/bin/python

# The oldest supported releases, in an environment of their own; OLDEST_TESTS are those of what upstream decides.
OLDEST := torch==2.11.0 triton==3.6.0 transformers==5.17.0
OLDEST_TESTS ?= tests/test_upstream.py tests/test_backend.py tests/test_host_tables.py

.PHONY: quickstart test test-oldest lint docs

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet "$(TORCH)"
	$(VENV)/bin/pip install --quiet --editable ".[transformers]"
	touch $@

$(VENV)/tools: $(VENV)/ready
	$(VENV)/bin/pip install --quiet --editable ".[test,docs]"
	touch $@

quickstart: $(VENV)/ready
	$(RUN) examples/quickstart.py

test: $(VENV)/tools
	$(RUN) -m pytest -n 2 --dist worksteal

.oldest/tools: pyproject.toml
	$(PYTHON) -m venv .oldest
	.oldest/bin/pip install --quiet --upgrade pip
	.oldest/bin/pip install --quiet $(OLDEST) --editable ".[test]"
	touch $@

test-oldest: .oldest/tools
	.oldest/bin/python -m pytest -n 2 --dist worksteal $(OLDEST_TESTS)

lint: $(VENV)/tools
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/tools
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
