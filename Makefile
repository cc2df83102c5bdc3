# The one way in. CI calls the same targets. What must be on the machine: Python 3.11 with venv, git, make.

PYTHON ?= python3
JOBS   ?= 2
ifeq ($(origin REPO),undefined)
REPO := $(CURDIR)
endif

BIN   := .venv/bin
STAMP := .venv/.set-up
ROOMS := $(patsubst %/pyproject.toml,%,$(wildcard libs/*/pyproject.toml services/*/pyproject.toml deploy/local/pyproject.toml))
CODE  := $(wildcard libs services deploy tests benchmarks)

export UV_PYTHON := .venv/bin/python
export UV_PYTHON_DOWNLOADS := never
export UV_NO_PROGRESS := 1
# Behind a proxy or a mirror pip is usually set up and uv is not: uv trusts whom the system trusts, and asks
# where pip asks.
ifneq ($(wildcard /etc/ssl/certs/ca-certificates.crt),)
export UV_SYSTEM_CERTS ?= 1
endif
UV = UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($(BIN)/python -m pip config get global.index-url 2>/dev/null)}}" $(BIN)/uv

# What `name==version` the lock holds, without the names that UPGRADE lets move.
PINS  = $(filter-out $(foreach name,$(UPGRADE),$(name)==%),$(shell sed -nE 's/^([A-Za-z0-9._-]+==[^ ;]+).*/\1/p' requirements.lock 2>/dev/null))
LOCK  = $(UV) lock --quiet $(if $(filter all,$(UPGRADE)),--upgrade,$(foreach pin,$(PINS) $(UPGRADE),--upgrade-package $(pin)))
EXPORT = $(BIN)/uv export --quiet --frozen --format requirements-txt --all-packages --all-groups \
	--no-emit-workspace --no-header --no-annotate

# Freshness: uv resolves again under the lock's own pins, so a newer release changes nothing. It asks the
# package registry. More hashes are no difference: projects add files to versions that are already out.

.DEFAULT_GOAL := help
.PHONY: help setup up demo check test test-all interop conformance mutants chaos chaos-long bench docs lock clean FORCE

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: $(STAMP) ## make .venv from requirements.lock (PYTHON=... chooses the interpreter)

up: $(STAMP) ## start everything on this machine; Ctrl-C stops it
	@$(BIN)/espalier up

demo: export DEMO_REPO = $(value REPO)
demo: export DEMO_MODEL = $(value MODEL)
demo: $(STAMP) ## let an agent write release notes for a git repository (REPO=path, MODEL=name; default: this, scripted)
	@$(BIN)/espalier demo --repo "$$DEMO_REPO" $${DEMO_MODEL:+--model "$$DEMO_MODEL"}

check: $(STAMP) ## style, types, import contracts, architecture, freshness of the lock
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q tests/architecture
	@$(LOCK)
	@sed 's/ \\$$//' requirements.lock > .venv/lock.have
	@$(EXPORT) | sed 's/ \\$$//' > .venv/lock.want
	@! diff .venv/lock.have .venv/lock.want | grep -E '^(<|> [^ ])' \
		|| { echo "requirements.lock is not what the pyproject files resolve to under its own pins: run 'make lock'." >&2; exit 1; }

test: $(STAMP) ## all tests but the slow ones
	$(BIN)/pytest -n $(JOBS) -m "not slow"

test-all: $(STAMP) ## all tests
	$(BIN)/pytest -n $(JOBS)

interop: $(STAMP) ## drive the runtime with the published client and with other people's
	$(BIN)/pytest -n $(JOBS) tests/contract tests/interop

conformance: export CONFORMANCE_ONLY = $(value ONLY)
conformance: $(STAMP) ## hold three fresh runtimes to AEP (ONLY=full, minimal or independent takes one)
	@$(BIN)/python -m tests.conformance "$$CONFORMANCE_ONLY"

mutants: export MUTANTS_ONLY = $(value ONLY)
mutants: $(STAMP) ## take one guard at a time from a copy; the kit must find each out (ONLY="words of its name")
	@$(BIN)/python -m tests.mutants "$$MUTANTS_ONLY"

chaos: export CHAOS_SEED = $(value SEED)
chaos: $(STAMP) ## kill, cut off and starve a whole runtime for minutes, and judge it (SEED=number)
	@$(BIN)/python -m tests.chaos --profile short $${CHAOS_SEED:+--seed "$$CHAOS_SEED"}

chaos-long: export CHAOS_SEED = $(value SEED)
chaos-long: $(STAMP) ## the same for 25 minutes
	@$(BIN)/python -m tests.chaos --profile long $${CHAOS_SEED:+--seed "$$CHAOS_SEED"}

bench: export BENCH_ONLY = $(value ONLY)
bench: export BENCH_OUT = $(value OUT)
bench: $(STAMP) ## measure this machine's runtime (ONLY=noop,idle chooses, OUT=file keeps the tables)
	@$(BIN)/python -m benchmarks --only "$$BENCH_ONLY" --out "$$BENCH_OUT"

docs: $(STAMP) ## rewrite the pages that are generated from the code
	$(BIN)/python -m espalier_local.settings_table > docs/settings.md
	$(BIN)/python -m espalier_local.protocol_pages docs/protocol

# Works on the stamp's environment even when the lock is what is being repaired.
lock: | $(BIN)/uv ## rewrite requirements.lock; pins stay (UPGRADE="name ..." moves some, UPGRADE=all everything)
	@$(LOCK) || { echo "Nothing was written. If pins no longer fit the pyproject files, name what may move: make lock UPGRADE=\"name ...\"." >&2; exit 1; }
	@$(EXPORT) --output-file requirements.lock >/dev/null

clean: ## remove .venv and what the tools cached (not the data in .espalier)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# A copied or moved checkout must not run the code of the one that it was copied from.
ifneq ($(shell cat .venv/.home 2>/dev/null),$(CURDIR))
$(BIN)/uv: FORCE
endif

# uv comes from the lock too, by hash; `pip` is used for nothing else.
$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "Espalier needs Python 3.11 or newer and '$(PYTHON)' is not: name one with make PYTHON=/path/to/python3.11." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "'$(PYTHON)' cannot make environments: install its venv package (Debian: apt-get install python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.lock
	@printf '%s\n' "$(CURDIR)" > .venv/.home

$(STAMP): $(BIN)/uv requirements.lock pyproject.toml $(ROOMS:=/pyproject.toml)
	@echo "Installing requirements.lock and the rooms into .venv"
	@$(UV) pip sync --quiet --compile-bytecode --require-hashes requirements.lock
	@$(BIN)/uv pip install --quiet --no-deps $(addprefix --editable ,$(ROOMS))
	@touch $(STAMP)
