# Two commands do everything on a machine with git, make and Python 3.11: `make quickstart`, `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Two files at a time: many tests of runs wait for a fault to be noticed, or for a process to end. In the order of
# tests/conftest.py: a long file that comes last would leave a core idle.
TWO_FILES := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# Where `make test-faults` keeps its results; empty is a folder in fault-walks/ for each state of the code.
FAULT_RESULTS ?=

# How long `make test-long` compares random jobs of fresh seeds with the single run.
DIFFERENCE_MINUTES ?= 60

# Which trials at the fault points `make test-long` draws: others at each call.
CORDEE_WALK_SEED ?= $(shell date +%s)

.PHONY: help quickstart test test-long test-faults test-env test-ray test-spark test-frameworks bench-engines bench-federated test-dashboard test-trackers unit lint types bench docs fuzz clean
help:
	@echo "make quickstart  set up, train by three strategies, kill a worker, show the results (two minutes)"
	@echo "make test        set up, run the tests"
	@echo "make test-long   only those that take minutes, then an hour of random jobs (DIFFERENCE_MINUTES=60)"
	@echo "make test-faults every kind of fault at every fault point; continues where it was ended (hours)"
	@echo "make test-env    the engine 'env' under torchrun, mpirun (openmpi-bin) and Slurm (slurm-wlm munge)"
	@echo "make test-ray    the engine 'ray' on a Ray of two nodes, in an environment of its own (.venv-ray)"
	@echo "make test-spark  the engine 'spark' on a Spark of two workers (.venv-spark; needs Java 17)"
	@echo "make test-dashboard  the dashboard in a browser (needs chromium)"
	@echo "make test-trackers  the sinks for MLflow and Weights & Biases, offline (installs both)"
	@echo "make test-frameworks  Accelerate, Lightning, the Hugging Face Trainer, TensorFlow, Keras, JAX (.venv-frameworks)"
	@echo "make bench-engines  the engines 'env', 'ray' and 'spark' beside their peers (in .venv-ray; needs Java 17)"
	@echo "make bench-federated  a simulated round beside Flower and pfl (.venv-flower, .venv-pfl)"
	@echo "make unit        only the unit tests (about a minute)"
	@echo "make lint types  ruff, mypy --strict"
	@echo "make bench       measure against the peers (installs them; some minutes)"
	@echo "make docs        build the documentation into site/"
	@echo "make fuzz        a minute of random bytes against the wire format's decoders"
	@echo "make clean       remove what the above made, and the environment"

# What users get; the stamp is remade when the requirements change.
$(VENV)/.cordee: pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Cordée needs Python 3.11 or later, $(PYTHON) is older: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) ..."; "$(PYTHON)" -m venv $(VENV); }
	@echo "installing Cordée and what it needs (about a minute the first time) ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.cordee
	@echo "installing what the tests need ..."
	@$(PIP) -e '.[dev]'
	@touch $@

# With matplotlib, for the picture.
$(VENV)/.quickstart: $(VENV)/.cordee
	@$(PIP) -e '.[report]'
	@touch $@

quickstart: $(VENV)/.quickstart
	@$(BIN)/python examples/quickstart.py

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TWO_FILES) tests/unit
	$(TWO_FILES) --durations 40 tests/e2e tests/distributed tests/faults tests/differences
	$(BIN)/pytest tests/engines/test_env_engine.py -k 'says_what_it_is and torchrun'

test-long: $(VENV)/.dev
	CORDEE_WALK_SEED=$(CORDEE_WALK_SEED) $(TWO_FILES) -v -m long --ignore tests/differences/test_random_jobs.py
	CORDEE_DIFFERENCE_MINUTES=$(DIFFERENCE_MINUTES) $(BIN)/pytest -v -s -m long tests/differences/test_random_jobs.py

test-faults: $(VENV)/.dev
	PYTHONPATH=tests:tests/faults $(BIN)/python -m walking --at-once 2 $(if $(FAULT_RESULTS),--results $(FAULT_RESULTS))

# Ray, Spark and the frameworks are large, and have requirements of their own.
.venv-ray/.engine .venv-spark/.engine .venv-frameworks/.engine: .venv-%/.engine: pyproject.toml constraints.txt
	@test -x .venv-$*/bin/python || { echo "creating .venv-$* ..."; "$(PYTHON)" -m venv .venv-$*; }
	@echo "installing Cordée with $* (some minutes the first time) ..."
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]' pytest pytest-timeout
	@touch $@

test-ray test-spark: test-%: .venv-%/.engine
	.venv-$*/bin/pytest tests/engines/test_$*_*.py

# In a real browser: Debian's package chromium.
test-dashboard: $(VENV)/.dev
	@$(PIP) -e '.[dashboard]' playwright axe-playwright-python
	$(BIN)/pytest tests/browser

# MLflow and Weights & Biases, offline.
test-trackers: $(VENV)/.dev
	@$(PIP) -e '.[mlflow,wandb]'
	$(BIN)/pytest tests/trackers

test-frameworks: .venv-frameworks/.engine
	.venv-frameworks/bin/pytest tests/frameworks

# Under torchrun, and under mpirun and Slurm where they are installed.
test-env: $(VENV)/.dev
	@$(PIP) -e '.[manifests]'
	$(BIN)/pytest tests/engines/test_env_*.py

unit: $(VENV)/.dev
	$(TWO_FILES) tests/unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.cordee
	@$(PIP) -e '.[bench]'
	$(BIN)/cordee bench overhead

# One environment with both, so that all of them take turns.
bench-engines: .venv-ray/.engine
	@.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,spark]'
	.venv-ray/bin/cordee bench engines $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(CASES),--cases $(CASES)) -o benchmarks/results/engines.json

# Flower and pfl in an environment each: what they pin contradicts what we pin.
bench-federated: $(VENV)/.cordee
	@test -x .venv-flower/bin/python || { "$(PYTHON)" -m venv .venv-flower && .venv-flower/bin/python -m pip install --quiet --disable-pip-version-check 'flwr[simulation]==1.41.0' torch==2.13.0; }
	@test -x .venv-pfl/bin/python || { "$(PYTHON)" -m venv .venv-pfl && .venv-pfl/bin/python -m pip install --quiet --disable-pip-version-check pfl==0.6.0 torch==2.13.0; }
	$(BIN)/cordee bench federated $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(CASES),--cases $(CASES)) -o benchmarks/results/federated.json

fuzz: $(VENV)/.cordee
	@$(PIP) -e '.[fuzz]'
	$(BIN)/python tests/fuzz/fuzz_wire.py -max_total_time=60 -max_len=4096 -rss_limit_mb=2048

docs: $(VENV)/.cordee
	@$(PIP) -e '.[docs]'
	$(BIN)/zensical build --strict --clean

clean:
	rm -rf $(VENV) .venv-ray .venv-spark .venv-frameworks site .cache build dist fault-walks .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
