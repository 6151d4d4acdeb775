# Every target makes the environment it needs: one .venv in this folder, made anew when what it is made from changes.
# PYTHON chooses the interpreter (3.10 or newer); ARGS goes to pytest, the benchmarks or the demo; TEST_PROCESSES is how
# many processes `make test` has beside each other (0: the tests run in pytest's own, as --pdb and -s need it):
#     make test ARGS="-k watch"      make test TEST_PROCESSES=0 ARGS="--pdb"      make bench ARGS="--list"

PYTHON ?= python3
ARGS ?=
TEST_PROCESSES ?= 3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.bench-ready
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-config demo-members test test-slow test-gpu test-peers test-torch test-wheel lint bench bench-whole gpu \
    results docs docs-online stubs clean

help:
	@echo "make demo       a training job that starts badly and tunes itself while it trains"
	@echo "make demo-config    one whose configuration a person changes while it trains"
	@echo "make demo-members   one that a node joins, loses a worker of and leaves while it trains"
	@echo "make test       the tests; test-slow and test-gpu: those left out of it"
	@echo "make test-peers torch's own tests of its DataLoader with ours in its place: CHECKOUT=/path/to/torchdata's repository"
	@echo "make test-torch import, smoke and seam tests on another torch: TORCH=2.11.0, or TORCH=newest"
	@echo "make test-wheel the sdist, the wheel made of it, and a job that trains with that wheel alone, without constraints"
	@echo "make lint       ruff and mypy"
	@echo "make bench      the benchmarks in under an hour, with their tables; bench-whole: as they are recorded"
	@echo "make gpu        for a machine with a GPU: the tests that need one, then the benchmarks that do, recorded"
	@echo "make results    benchmarks/RESULTS.md, from benchmarks/results/"
	@echo "make docs       the documentation, into build/docs; docs-online: with links to Python's and torch's, all looked up"
	@echo "make stubs      the code for the master's messages, from master.proto (Python 3.12 or older)"
	@echo "make clean      remove all that make has made"

# setuptools comes first and builds the project in place, so that the build too uses the pinned version.
# The stamp is written last: an installation that was cut short is made again.
$(READY): setup.py setup.cfg pyproject.toml constraints.txt elastic_ext/version.py
	@command -v $(PYTHON) >/dev/null || { \
	    echo "$(PYTHON) was not found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.10 or newer is needed: make PYTHON=/path/to/python3" >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments; install its venv module (Debian, Ubuntu: python3-venv)" >&2; \
	    exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) -V 2>&1), once: pip downloads torch, and what the tests and the documents need."
	@echo "That takes minutes, and prints nothing. With CUDA torch takes gigabytes, and some 200 MB where"
	@echo "PIP_EXTRA_INDEX_URL names torch's own index of builds for CPUs alone."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation --editable ".[dev,docs]"
	@touch $@

# What the benchmarks compare with comes on top; nothing else needs it. It goes where the environment is made anew.
$(BENCH_READY): $(READY)
	@$(PIP_INSTALL) --no-build-isolation --editable ".[bench]"
	@touch $@

demo: $(READY)
	@$(BIN)/python -m examples.tunes_itself $(ARGS)

demo-members: $(READY)
	@$(BIN)/python -m examples.nodes_come_and_go

demo-config: $(READY)
	$(BIN)/python -m examples.live_config

test: $(READY)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu $(ARGS)

# What those tests import besides is installed for them alone, as torch's repository does.
test-peers: $(READY)
	@test -n "$(CHECKOUT)" || { \
	    echo "name a checkout of torchdata's repository, outside of this one: make test-peers CHECKOUT=/path/to/it" >&2; \
	    exit 1; }
	@$(PIP_INSTALL) expecttest
	$(BIN)/python -m tests.support.peers $(CHECKOUT) $(if $(ARGS),-- $(ARGS))

# Another torch, beyond the bound in setup.cfg too, in an environment of its own. What else the library needs comes in the
# newest versions that go together with it, as a user gets them. Builds of torch for CPUs alone come from an index that
# PIP_EXTRA_INDEX_URL names; without it pip takes those for GPUs, of some gigabytes.
TORCH ?=
TORCH_ENV := build/torch-$(TORCH)
TORCH_TESTS := tests/torch_private tests/test_version.py tests/test_installed.py tests/agent/test_agent_torchrun.py \
    tests/agent/test_clocks.py tests/fsdp/reshard/test_reshard.py tests/training/test_trainer.py
OTHERS := import configparser; found = configparser.ConfigParser(); found.read("setup.cfg"); \
    print(*(each for each in found["options"]["install_requires"].split() if not each.startswith("torch>")))
test-torch:
	@test -n "$(TORCH)" || { echo "name a version of torch: make test-torch TORCH=2.11.0, or TORCH=newest" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(TORCH_ENV)
	@$(TORCH_ENV)/bin/python -m pip install --quiet --disable-pip-version-check setuptools hypothesis mypy pytest \
	    $(if $(filter newest,$(TORCH)),torch,torch==$(TORCH)) $$($(PYTHON) -c '$(OTHERS)')
	@$(TORCH_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	$(TORCH_ENV)/bin/python -m pytest $(TORCH_TESTS) $(ARGS)

# What a release has, as a user gets it: away from this folder, in an environment that no constraint holds back.
WHEEL := build/wheel
test-wheel:
	@rm -rf $(WHEEL)
	@$(PYTHON) -m venv $(WHEEL)/build
	@$(WHEEL)/build/bin/python -m pip install --quiet --disable-pip-version-check build
	@$(WHEEL)/build/bin/python -m build --outdir $(WHEEL)/dist .
	@$(PYTHON) -m venv $(WHEEL)/env
	@$(WHEEL)/env/bin/python -m pip install --quiet --disable-pip-version-check $(WHEEL)/dist/*.whl
	@$(WHEEL)/env/bin/python -m pip check
	@cp examples/nano_gpt.py $(WHEEL)
	cd $(WHEEL) && env/bin/elastic-ext --version && env/bin/python -m elastic_ext.master --version
	cd $(WHEEL) && ELASTIC_EXT_RUN_DIR=run env/bin/elastic-run --standalone --nproc-per-node=2 nano_gpt.py --steps=4 \
	    --checkpoint-every=2 --checkpoints=storage && env/bin/elastic-ext ckpt verify storage
	$(WHEEL)/env/bin/python -m tests.support.documented_commands

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(BENCH_READY)
	$(BIN)/python -m benchmarks --short $(ARGS)

bench-whole: $(BENCH_READY)
	$(BIN)/python -m benchmarks $(ARGS)

# What tests find wrong needs no measuring: the benchmarks follow where all of them pass.
gpu: $(BENCH_READY)
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m benchmarks --gpu --record $(ARGS)
	$(BIN)/python -m benchmarks.results_page

results: $(READY)
	$(BIN)/python -m benchmarks.results_page

docs: $(READY)
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html -d build/doctrees docs build/docs

# What needs the network: it fails where a page elsewhere is gone.
docs-online: export ELASTIC_EXT_DOCS_ONLINE = 1
docs-online: $(READY)
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html -d build/doctrees-online docs build/docs-online
	$(BIN)/python -m sphinx -W -n --keep-going -q -b linkcheck -d build/doctrees-online docs build/links

# By a compiler as old as the oldest supported protobuf, whose code newer ones load too.
WIRE := elastic_ext/master/wire
stubs:
	$(PYTHON) -m venv --clear build/stubs
	build/stubs/bin/python -m pip install --quiet --disable-pip-version-check "grpcio-tools==1.62.3" "setuptools<81"
	build/stubs/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. $(WIRE)/master.proto

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find elastic_ext tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
