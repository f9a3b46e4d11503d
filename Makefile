# Every target does its own set-up, in .venv. PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test stress coverage lint format bench peers docs clean

help:
	@echo "make demo    train on CartPole with and without conditional updates; a table and a figure"
	@echo "make test    the tests"
	@echo "make stress  the long tests"
	@echo "make coverage  the tests, and which branches of the package they take"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff format and fix"
	@echo "make bench   the benchmarks"
	@echo "make peers   late priorities and throughput next to cpprb, Reverb and others"
	@echo "make docs    the site, in docs/build/html; runs the tutorials"
	@echo "make clean   remove what the targets made, except $(VENV)"

# RECORD is the last file that pip writes. A package without it was interrupted, yet counts as there.
$(INSTALLED): pyproject.toml setup.py
	@for info in $(VENV)/lib/python*/site-packages/*.dist-info; do \
		[ -e "$$info/RECORD" ] || rm -rf "$$info"; done
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e '.[test,examples,docs,lint]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python docs/source/tutorials/async_prioritized_dqn.py --output outputs

test: $(INSTALLED)
	$(BIN)/python -m pytest

stress: $(INSTALLED)
	$(BIN)/python -m pytest -m stress

coverage: $(INSTALLED)
	mkdir -p outputs
	$(BIN)/python -m pytest --cov --cov-fail-under=95

lint: $(INSTALLED)
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m ruff check
	cd torchrl/data/replay_buffers && "$(CURDIR)/$(BIN)/python" -m mypy \
		--config-file "$(CURDIR)/pyproject.toml" --ignore-missing-imports -p generations

format: $(INSTALLED)
	$(BIN)/python -m ruff format
	$(BIN)/python -m ruff check --fix

bench: $(INSTALLED)
	$(BIN)/python -m pytest benchmarks

peers: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -e '.[peers]'
	$(BIN)/python benchmarks/compare_peers.py --output outputs/peers.json

# SPHINXOPTS="-D plot_gallery=0" leaves the tutorials out, for a quick look.
docs: $(INSTALLED)
	MPLBACKEND=agg $(BIN)/python -m sphinx -n -W --keep-going $(SPHINXOPTS) docs/source docs/build/html
	@echo "Open docs/build/html/index.html"

clean:
	rm -rf docs/build docs/source/gallery docs/source/reference/generated docs/source/guides/benchmark.csv
	rm -rf build dist outputs *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks
	find . -path ./$(VENV) -prune -o -name __pycache__ -exec rm -rf {} +
