# Everything runs in .venv, made on first use and remade only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# One worker per core: more threads of torch would only wait. Compiled files are kept because many tests start processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo test soak lint docs bench clean

demo: $(READY)
	$(BIN)/sordino run

test: $(READY)
	$(PYTEST) -m "not soak"

soak: $(READY)
	# Random fault schedules, long statistics, large searches and browsers.
	$(PYTEST) -m soak

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

docs: $(READY)
	# The site in docs/_build/html: every warning is an error, every tutorial runs, nothing is fetched.
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(READY)
	# Fails where a ratio grew by more than 15 % against the committed one of this architecture. To keep the new figures
	# anyway: make bench ACCEPT=--accept
	@status=0; \
	$(BIN)/python benchmarks/bench.py $(ACCEPT) || status=1; \
	$(BIN)/python benchmarks/many.py $(ACCEPT) || status=1; \
	exit $$status

clean:
	rm -rf .venv runs

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Sordino needs Python 3.11 or newer; try make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs,flower,images,report,search,sklearn,transformers]'
	@touch $@
