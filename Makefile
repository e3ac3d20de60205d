# Everything runs in .venv, which the first target makes. TORCH=torch==2.13.0 chooses a release.
PYTHON ?= python3
TORCH ?= torch>=2.11
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: quickstart test lint docs

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

lint: $(VENV)/tools
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/tools
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
