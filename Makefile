# A fresh clone needs Python 3.11 or newer and make, and a C++ compiler for the tests; the rest is installed into .venv.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PACKAGE := .venv/.package
INSTALLED := .venv/.installed
# In pytest-xdist 3.8, a new worker in place of one that crashed crashes in the same test, and the end is never reached.
WORKERS := --dist loadfile --no-loadscope-reorder --max-worker-restart 0
COMPILED := deepspeed hypothesis matplotlib networkx numba numpy scipy sklearn sympy timm torch torchvision wandb
DEMO_TRAIN = OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --local-addr localhost --nproc-per-node \
	$$($(BIN)/python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)') -m launch.train
# Containers often set this. Without saved bytecode, every process that a test starts compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo table test quick lint docs sizes release clean

help:
	@echo 'make demo    train with expert views and with a viewmaker, and compare them in one report (minutes on 2 cores)'
	@echo 'make test    run every test that this machine can run, on 2 cores; ARGS="-k slurm" picks some'
	@echo 'make quick   run the tests that start no other process and take no long time'
	@echo 'make lint    formatting, ruff, mypy --strict'
	@echo 'make table   train, probe and report a study on this machine, such as make table STUDY=table1_small'
	@echo 'make docs    build/docs/index.html: these docs and an API reference; a broken link is an error'
	@echo 'make sizes   the lines of each room of the code and the words of the docs, beside their budgets'
	@echo 'make release build/dist: an sdist and a wheel, if version, changelog and citation agree'
	@echo 'make clean   remove .venv, the demo and all caches'
	@echo 'Each makes .venv first where it is missing or older than setup.py; PYTHON=python3.12 picks the interpreter.'

# A command that was interrupted goes on from where it stopped. Two processes never share a GPU.
demo: $(PACKAGE)
	@echo '1 of 4: draw 7,000 pictures (10 s on 2 idle cores)'
	$(BIN)/python -m data_pipeline build procedural_digits --overlay online --out demo/data/train --limit 5000
	$(BIN)/python -m data_pipeline build procedural_digits --overlay online --out demo/data/test --split test --limit 2000
	@echo '2 of 4: train with expert views (1 minute), and picture them'
	$(DEMO_TRAIN) --config demo:expert --run-dir demo/expert
	$(BIN)/python -m trainer.analyze views demo/expert
	@echo 'Eight samples and two views of each: $(CURDIR)/demo/expert/analysis/views.png'
	@echo '3 of 4: train with a viewmaker (1.5 minutes), and picture its views'
	$(DEMO_TRAIN) --config demo:viewmaker --run-dir demo/viewmaker
	$(BIN)/python -m trainer.analyze views demo/viewmaker
	@echo '4 of 4: probe both encoders, and compare them (45 s)'
	$(BIN)/python -m trainer.probe demo/expert demo/viewmaker --untrained
	$(BIN)/python -m trainer.report demo/expert demo/viewmaker --out demo/report.html
	@echo 'The report: $(CURDIR)/demo/report.html'

table: $(INSTALLED)
	@test -n '$(STUDY)' || { echo 'error: name a study: make table STUDY=table1_small' >&2; exit 1; }
	$(BIN)/python launch/slurm.py --executor local --study studies:$(STUDY) --at-a-time 2
	$(BIN)/python -m trainer.probe runs/$(STUDY) --untrained
	$(BIN)/python -m trainer.report --study $(STUDY) runs/$(STUDY)

test: $(INSTALLED)
	$(BIN)/pytest -n 3 $(WORKERS) $(ARGS)

quick: $(INSTALLED)
	$(BIN)/pytest -n 2 $(WORKERS) -m 'not (ranks or process or slurm or slow)' $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml

sizes:
	@$(PYTHON) .ci/sizes

release: $(INSTALLED)
	.ci/release

clean:
	rm -rf .venv demo build .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# For the demo: the package alone, with the torch of the tests.
$(PACKAGE): setup.py
	@command -v $(PYTHON) >/dev/null || { echo 'error: there is no $(PYTHON); install Python 3.11 or newer, or name it: make PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python 3.11 or newer is needed, but $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo 'error: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv' >&2; exit 1; }
	@echo 'Installing the package into .venv: 5 GB, a few minutes on a fast connection'
	$(PYTHON) -m venv .venv
	$(BIN)/python .ci/install tested
	@touch $@

# For everything else: what the tests, the linters and the docs need, too.
$(INSTALLED): $(PACKAGE)
	$(BIN)/python .ci/install tested,test,lint,docs
	@# Python compiles a module when it first imports it. Most of the 21,000 modules of all packages are never imported. Most
	@# of COMPILED and of our own are, and all processes that make test starts at once would each compile them for itself.
	$(BIN)/python -m compileall -qq -j 2 -x '/tests?/' $(addprefix .venv/lib/python*/site-packages/,$(COMPILED)) \
		configs data_pipeline launch trainer
	@touch $@
