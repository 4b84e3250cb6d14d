# make demo | test | check | bench: each works on a fresh machine with Python 3.11 or newer and pip.
PYTHON ?= python3
BIN := .venv/bin
# Threaded BLAS makes small array work slower and timings noisy.
export OMP_NUM_THREADS ?= 1

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps

.PHONY: demo test check bench lock clean

demo: .venv/runtime
	$(BIN)/trimtab demo

test: .venv/development tests/packages.sh
	@sh tests/packages.sh
	$(BIN)/pytest -n auto --dist loadfile

check: .venv/development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: .venv/development
	$(BIN)/python -m bench.tick

# The locks name every package with its version and hashes, so pip has nothing to resolve.
.venv/runtime: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Trimtab needs Python 3.11 or newer; $(PYTHON) is older. Say: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv .venv
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) --no-build-isolation -e .
	@echo "compiling the simulator to machine code, once: about 40 s"
	$(BIN)/python -m models.fleetsim
	@touch $@

.venv/development: .venv/runtime requirements-dev.lock
	$(PIP) --require-hashes -r requirements-dev.lock
	@touch $@

# Resolves the newest versions that fit pyproject.toml, for every platform and Python from 3.11 on.
LOCK := $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-emit-find-links --no-header --no-annotate --quiet --upgrade pyproject.toml
lock: .venv/development
	$(BIN)/python -m pip install --quiet uv
	$(LOCK) --extra build --extra dev -o requirements-dev.lock
	$(LOCK) --extra build -c requirements-dev.lock -o requirements.lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
