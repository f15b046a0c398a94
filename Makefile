# The main targets are `make demo` and `make test`. They create .venv once; PYTHON=python uses the active environment.
BASE_PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
PYTHON ?= $(VENV_PYTHON)
# Test processes. On two cores, three are faster than two, because tests wait for the processes that they start.
WORKERS ?= 3
# A worker gets whole files, in the order of tests/conftest.py.
BY_FILE := --dist loadfile --no-loadscope-reorder

# A tenth of the tests, from every folder.
CHECKED := $(addprefix tests/,test_circles.py test_ranges.py test_main.py model/test_norms.py model/test_backends.py \
	training/test_optim.py monitors/test_attention_parts.py monitors/test_precision.py \
	monitors/test_mechanism.py store/test_store_metrics.py \
	store/test_store_alarms.py data/shards/test_tars.py data/shards/test_images.py data/test_packing.py data/test_coupling.py \
	data/tokenizers/test_text.py \
	lab/grid/test_language.py lab/test_counts.py \
	lab/metrics/test_outcomes.py benchmarks/test_flops.py interop/test_write.py)

.PHONY: cluster-test help setup demo claims late late-rehearsal late-rescue check test test-training test-slow soak soak-quick wheel-test golden pages test-oldest test-oldest-torch tensorboard clean

help:
	@echo "make setup        make .venv and install mmqk"
	@echo "make demo         train the demonstration and write reports/demo/index.html"
	@echo "make claims       train the runs of the registered claims and write reports/claims/index.html"
	@echo "make late         train the runs of the study of late failure (24 core hours) and write reports/late/index.html"
	@echo "make late-rehearsal  one run that fails late beside its twin with QK-Norm"
	@echo "make late-rescue  remedies switched on before two runs fail (6 core hours)"
	@echo "make test         lint, types and all tests that are not slow"
	@echo "make test-training  the training tests, for example with ATEN_CPU_CAPABILITY=default"
	@echo "make test-slow    the slow tests: several processes, kills, pairs of remedies, benchmarks"
	@echo "make cluster-test  grids on a SLURM node and a Ray cluster on this machine (slurm-wlm and munge from Debian)"
	@echo "make wheel-test   install the wheel into a new environment and use it in an empty folder"
	@echo "make soak         plant thousands of faults: kills, disk errors, crashes, bad files and numbers; continues"
	@echo "make soak-quick   the same with a few faults of each kind"
	@echo "make check        lint, types and a tenth of the tests"
	@echo "make golden       train nine short runs and compare their numbers with the stored ones"
	@echo "make test-oldest  the tests with the oldest supported version of every dependency, in a separate environment"
	@echo "make test-oldest-torch  test the monitors on torch 2.6, in a separate environment"
	@echo "make pages        render the pages of reports/examples from their packs"
	@echo "make tensorboard  open the dashboards of runs/"
	@echo "make clean        remove what minutes make again: the environments, .cache and reports/demo; never runs/"
	@echo "Add PYTHON=python to use the active environment instead of .venv."

setup: .venv/installed

demo: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed)
	$(PYTHON) -m mmqk.ablate --config configs/ablations/demo.yaml --jobs 2
	$(PYTHON) -m mmqk.report runs/demo --out reports/demo

# One pool of runs, about 94 minutes on two cores. MINUTES=50 stops after 50 minutes; the next call continues.
# FROM=reports/examples/claims.zip copies the runs of the repository first.
claims: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed)
	$(PYTHON) -m mmqk.ablate --config configs/claims/learning_rates.yaml --config configs/claims/modalities.yaml \
		--config configs/claims/placement.yaml --config configs/claims/competition.yaml \
		--out runs/claims --jobs 2 $(if $(MINUTES),--max-minutes $(MINUTES)) $(if $(FROM),--from $(FROM))
	$(PYTHON) -m mmqk.report runs/claims --out reports/claims

# About 24 core hours. MINUTES=50 stops after 50 minutes; the next call continues.
# FROM=reports/examples/late.zip copies the runs of the repository first.
late: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed)
	$(PYTHON) -m mmqk.ablate --config configs/failures/late.yaml --out runs/late --jobs 2 \
		$(if $(MINUTES),--max-minutes $(MINUTES)) $(if $(FROM),--from $(FROM))
	$(PYTHON) -m mmqk.report runs/late --out reports/late

late-rehearsal: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed)
	$(PYTHON) -m mmqk.ablate --config configs/failures/late_rehearsal.yaml --out runs/late_rehearsal --jobs 2
	$(PYTHON) -m mmqk.report runs/late_rehearsal --out reports/late_rehearsal

# About 6 core hours. MINUTES and FROM=reports/examples/late_rescue.zip as above.
late-rescue: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed)
	$(PYTHON) -m mmqk.ablate --config configs/failures/late_rescue.yaml --out runs/late_rescue --jobs 2 \
		$(if $(MINUTES),--max-minutes $(MINUTES)) $(if $(FROM),--from $(FROM))
	$(PYTHON) -m mmqk.report runs/late_rescue --out reports/late_rescue

test: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy & types=$$!; $(PYTHON) -m pytest --numprocesses $(WORKERS) $(BY_FILE) -m 'not slow'; tests=$$?; \
		wait $$types && exit $$tests

test-training: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	$(PYTHON) -m pytest --numprocesses $(WORKERS) $(BY_FILE) -m 'not slow' tests/training

test-slow: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	$(PYTHON) -m pytest --numprocesses $(WORKERS) $(BY_FILE) -m slow

check: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest --numprocesses auto --maxprocesses 4 $(BY_FILE) $(CHECKED)

cluster-test: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	command -v slurmctld > /dev/null || apt-get install -y -qq slurm-wlm munge
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[slurm,ray]'
	$(PYTHON) -m pytest tests/cluster

wheel-test: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	$(PYTHON) -m tests.wheel

soak: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.soak

soak-quick: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.soak --quick --out runs/soak-quick

golden: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed-test)
	$(PYTHON) -m tests.golden

pages: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed)
	ls reports/examples/*.zip | sed 's/.zip$$//' | xargs -P 2 -I PACK $(PYTHON) -m mmqk.report PACK.zip --out PACK

# uv installs the lowest version that pyproject.toml allows of each dependency.
test-oldest:
	test -d .venv-oldest || $(BASE_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=.venv-oldest .venv-oldest/bin/python -m uv pip install --quiet --resolution lowest-direct -e '.[test]'
	.venv-oldest/bin/python -m pytest --numprocesses $(WORKERS) $(BY_FILE) -m 'not slow'

# The monitors support an older torch than the rest of mmqk. The files left out train with mmqk.
test-oldest-torch:
	test -d .venv-torch-2.6 || $(BASE_PYTHON) -m venv .venv-torch-2.6
	.venv-torch-2.6/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.6.*' \
		pytest numpy pillow scipy pandas pyyaml matplotlib jinja2
	.venv-torch-2.6/bin/python -m pytest tests/monitors \
		$(addprefix --ignore=tests/monitors/,test_free.py test_mechanism.py test_second_moment.py test_weights.py)

tensorboard: $(if $(filter $(VENV_PYTHON),$(PYTHON)),.venv/installed)
	@echo "open http://localhost:6006/#custom_scalars"
	$(PYTHON) -m tensorboard.main --logdir runs --samples_per_plugin scalars=1000000

clean:
	rm -rf .venv .venv-oldest .venv-torch-2.6 .cache reports/demo

$(VENV_PYTHON):
	$(BASE_PYTHON) -m venv .venv

.venv/installed: pyproject.toml | $(VENV_PYTHON)
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[lab]'
	@touch $@

.venv/installed-test: pyproject.toml | $(VENV_PYTHON)
	$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ .venv/installed
