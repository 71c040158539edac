# Two commands do all their own set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready

.PHONY: demo test lint types tests campaign bench docs clean

demo: $(INSTALLED)
	$(BIN)/nanguard demo

test: lint types tests

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples docs/*.py docs/causes/panels.py
	$(BIN)/ruff format --check src tests benchmarks examples docs/*.py docs/causes/panels.py

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	PYTHONUNBUFFERED=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The long campaigns whole; `make test` runs a slice of each.
campaign: $(READY)
	PYTHONUNBUFFERED=1 $(BIN)/python -m pytest -n 2 --dist worksteal --campaign

# On a machine with an NVIDIA GPU.
bench: $(READY)
	$(BIN)/python benchmarks/overhead.py

# The documentation as a site, in site/. The message that is turned off is about a successor of the theme.
docs: $(READY)
	test -x $(BIN)/mkdocs || $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# torch comes first and alone: any package that asks for torch before it is there may bring another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

# SpeechBrain and timm ask for torchaudio and torchvision, which have no CPU build for this torch: torchvision lies apart,
# for the tests that can do without its kernels.
$(READY): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt speechbrain hyperpyyaml timm
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt --target $(VENV)/torchvision torchvision
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis runs nanguard-runs site
