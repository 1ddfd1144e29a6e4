# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help

.PHONY: help
help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(INSTALLED)  ## Make .venv with the package and the pinned development tools.

# torch by itself and by its exact pin: a range, even one of another package, would fetch the newest build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	sync  # the tests flush what they save, and may otherwise wait for gigabytes of packages
	touch $@

.PHONY: lint
lint: $(INSTALLED)  ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: $(INSTALLED)  ## Fix what the linter can fix, and format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: types
types: $(INSTALLED)  ## Check types.
	$(BIN)/pyrefly check

# Two processes of one thread each; kernels run in Triton's interpreter, so that no GPU is needed. Bytecode is kept, whatever
# the environment says: pytest would write the tests' assertions anew in every process.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Pages are tested in a browser where there is one; it is installed where that is a matter of one command.
.PHONY: browser
browser:
	@command -v chromium > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && \
		echo "installing chromium, to test pages in" && apt-get update -qq > /dev/null 2>&1 && \
		DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq chromium > /dev/null 2>&1; } || true

.PHONY: test
test: lint types browser  ## Lint, check types, and run the tests on the CPU: every claim, in 8 minutes on two cores.
	$(PYTEST) -m "not slow"

.PHONY: test-all
test-all: lint types browser  ## The same, with every claim in all of its cases.
	EXAMPLES=100 $(PYTEST)

# What an installation is likely to break, and little else: the public names, the family's steps, the command.
SMOKE := tests/test_public.py tests/test_arguments.py tests/test_contract.py tests/test_checkpoint.py \
	tests/test_papers.py tests/test_fused.py tests/test_dcp.py tests/test_cli.py tests/test_pretrain.py

.PHONY: test-smoke
test-smoke: $(INSTALLED)  ## Run a few of the tests, of every part: for other versions of Python and torch.
	$(PYTEST) -m "not slow" $(SMOKE)

.PHONY: coverage
coverage: $(INSTALLED) browser  ## Run the tests of `make test` and fail below 95% of lines.
	$(PYTEST) -m "not slow" --cov --cov-report term

.PHONY: test-cuda
test-cuda: $(INSTALLED)  ## Run the tests that need an NVIDIA GPU.
	$(BIN)/python -m pytest -m cuda

# Threads that wait for each other sleep: beside other work, on the same two cores, they would only take its place.
.PHONY: demo
demo: export OMP_WAIT_POLICY = passive
demo: $(INSTALLED)  ## Train a small LLaMA with APOLLO, APOLLO-Mini and AdamW on the CPU, report, and let it write.
	rm -rf runs/demo
	$(BIN)/apollo compare --config examples/demo.yaml --methods apollo,apollo-mini:lr=3e-3,adamw:lr=2.5e-3 --out runs/demo
	$(BIN)/apollo write runs/demo/apollo-seed-0 "Dorothy" --seed 0

.PHONY: results
results: $(INSTALLED)  ## Fill in the tables, and draw the pictures, of the docs from bench/results.
	$(BIN)/python bench/results.py
	$(BIN)/python bench/plot.py

.PHONY: docs
docs: $(INSTALLED)  ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: clean
clean:  ## Remove what the targets made, .venv included.
	rm -rf $(VENV) site dist .pytest_cache .ruff_cache .hypothesis .coverage
