# Everything a developer or CI does with this repository. `make` lists the targets.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
#   NAME=lane           the benchmark that `make bench` runs
#   PYTEST_ARGS="..."   more arguments for pytest, such as "-n 2" or "tests/project -x"
#   ARGS="..."          more arguments for the program that `make demo`, `make bench` or `make up` runs

PYTHON ?= python3
NAME ?=
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Changed when everything was installed; older than the files below: install again.
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
# The virtual environment's interpreter if there is one, else the one to make it with.
INTERPRETER = $(or $(wildcard $(BIN)/python),$(PYTHON))
# The programs in benchmarks/, as opposed to the modules that they share.
BENCHMARKS := $(basename $(notdir $(shell grep -l '^if __name__ == "__main__":' benchmarks/*.py)))

MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help venv demo test check check-python check-spelling check-stubs check-protos bench proto proto-release up clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(DEV) ## create .venv with all that is needed to develop

$(RUNTIME): pyproject.toml constraints.txt tools/install.py
	@$(INTERPRETER) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Omnistage needs Python 3.11 or newer, and "$(INTERPRETER)" is none: remove $(VENV) if it exists,' >&2; \
	  echo 'and name another interpreter, such as: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	@$(INTERPRETER) tools/install.py runtime
	@touch $@

$(DEV): $(RUNTIME)
	@$(INTERPRETER) tools/install.py dev
	@touch $@

demo: $(RUNTIME) ## start the server on its embedded models, synthesize speech, stop
	$(BIN)/python tools/demo.py $(ARGS)

up: $(RUNTIME) ## start the router and all stages on this machine
	$(BIN)/omnistage up $(ARGS)

test: $(DEV) ## run all tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: check-python check-spelling check-stubs check-protos ## check style, types, spelling, stubs and protos

check-python: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy tools/*.py benchmarks/*.py

check-spelling: $(DEV)
	$(BIN)/codespell

check-stubs: $(DEV)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/generate_stubs.py --check

check-protos: $(DEV)
	$(BIN)/python tools/check_protos.py

proto: $(DEV) ## format protos/ and generate the Python stubs from it
	$(BIN)/buf format -w protos
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/generate_stubs.py

proto-release: $(DEV) ## record protos/ as released: later changes must be compatible
	$(BIN)/python tools/check_protos.py --release

ifneq ($(filter $(NAME),$(BENCHMARKS)),)
bench: $(RUNTIME) ## run the benchmark NAME; without NAME list them
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)
else
bench:
	@echo 'Benchmarks, each run by "make bench NAME=...": $(BENCHMARKS)'
	$(if $(NAME),@echo 'There is no benchmark "$(NAME)".' >&2; exit 2)
endif

clean: ## remove what was built, measured and cached, but not .venv
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .coverage *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
