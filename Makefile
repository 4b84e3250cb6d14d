# make demo | test | check | bench: each works on a fresh machine with Python 3.11 or newer and pip.
PYTHON ?= python3
BIN := .venv/bin
# Threaded BLAS makes small array work slower and timings noisy.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check bench lock clean

demo: .venv/installed
	$(BIN)/trimtab demo

test: .venv/installed tests/packages.sh
	@sh tests/packages.sh
	$(BIN)/pytest

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: .venv/installed
	$(BIN)/python -m bench.tick

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Trimtab needs Python 3.11 or newer; $(PYTHON) is older. Say: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Resolves the newest versions that fit pyproject.toml, for every platform and Python from 3.11 on.
lock:
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --no-emit-find-links --no-header --extra dev --upgrade pyproject.toml -o requirements.lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
