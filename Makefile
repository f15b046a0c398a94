# Two commands do everything: `make demo` and `make test`.
# They make .venv once; PYTHON=python uses the environment that is active instead.
BASE_PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
PYTHON ?= $(VENV_PYTHON)

.PHONY: help setup demo test lint tensorboard clean

help:
	@echo "make setup        make .venv and install mmqk into it"
	@echo "make demo         train the demonstration and write reports/demo/index.html"
	@echo "make test         lint, types and tests"
	@echo "make tensorboard  open the dashboards of runs/"
	@echo "Add PYTHON=python to use the environment that is active instead of .venv."

setup: .venv/installed

demo: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed)
	$(PYTHON) -m mmqk.ablate --config configs/ablations/demo.yaml --jobs 2
	$(PYTHON) -m mmqk.report runs/demo --out reports/demo

test: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest

tensorboard: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed)
	@echo "open http://localhost:6006/#custom_scalars"
	$(PYTHON) -m tensorboard.main --logdir runs --samples_per_plugin scalars=1000000

clean:
	rm -rf .venv .cache runs reports/demo

$(VENV_PYTHON):
	$(BASE_PYTHON) -m venv .venv

.venv/installed: pyproject.toml | $(VENV_PYTHON)
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/installed-test: pyproject.toml | $(VENV_PYTHON)
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ .venv/installed
