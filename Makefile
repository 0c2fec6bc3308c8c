# Everything runs in .venv, made on first use and remade only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
EXTRAS := docs,excel,flower,images,onnx,postgres,report,search,sklearn,tables,transformers,verify
# One worker more than cores, because some tests wait for processes and disks. More threads of torch would only wait.
# Compiled files are kept because many tests start processes.
WORKERS = $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test soak test-python image-steps lint docs bench clean

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
	@rm -f docs/_build/checked
	$(BIN)/python -m sphinx -W --keep-going -q -j auto -b html docs docs/_build/html
	# Its links, its pages, and what it loads. `make test` does not repeat that for this site.
	$(BIN)/python -m pytest -m "not soak" tests/docs/test_site.py
	@touch docs/_build/checked

bench: $(READY)
	# Fails where a ratio grew by more than 15 % against the committed one of this architecture. To keep the new figures
	# anyway: make bench ACCEPT=--accept
	@status=0; \
	$(BIN)/python benchmarks/bench.py $(ACCEPT) || status=1; \
	$(BIN)/python benchmarks/many.py $(ACCEPT) || status=1; \
	exit $$status

# The core tests under another Python, in a virtual environment of its own: make test-python PYTHON=python3.12
# Where torch has no wheel for that Python (or none without CUDA), TORCH=no runs the part that works without torch.
TORCH ?= yes
OTHER = build/$(notdir $(PYTHON))
CORE_TESTS := tests/test_core.py tests/test_imports.py tests/test_package.py tests/test_tree.py tests/test_wire.py tests/privacy tests/evidence \
	tests/rules tests/methods tests/engines/test_oracle.py tests/engines/test_shapes.py tests/data/test_records.py
TORCHLESS_TESTS := tests/test_files.py tests/methods/test_bounds.py tests/privacy/accounting tests/privacy/test_participation.py \
	tests/evidence/test_ledger.py tests/privacy/mechanisms/test_discrete_gaussian.py tests/privacy/mechanisms/test_shares.py \
	--ignore=tests/privacy/accounting/test_selection.py -k "not counted"
test-python:
	$(PYTHON) -m venv --clear $(OTHER)
ifeq ($(TORCH),no)
	$(OTHER)/bin/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; o = p["optional-dependencies"]; \
	  print(*(d for d in p["dependencies"] + o["tables"] + o["verify"] + o["dev"] if not d.startswith(("torch", "mypy", "ruff"))), sep="\n")' > $(OTHER)/wanted.txt
	PIP_CONSTRAINT=constraints.txt $(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -r $(OTHER)/wanted.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps .
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n auto -m "not soak" $(TORCHLESS_TESTS)
else
	PIP_CONSTRAINT=constraints.txt $(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check '.[dev,report,sklearn,tables,verify]'
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n auto -m "not soak" $(CORE_TESTS)
endif

# The steps of the Dockerfile, in a clean virtual environment outside the source tree.
image-steps:
	@folder=$$(mktemp -d) && PYTHON=$(PYTHON) sh deploy/image.sh everything . $$folder && rm -rf $$folder

clean:
	rm -rf .venv build runs

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Sordino needs Python 3.11 or newer; try make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "Installing into .venv, once: about 3 minutes"
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev,$(EXTRAS)]'
	# pip would compile on one core. Tests of packages, and files for other Pythons, stay uncompiled.
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(CURDIR)/.venv/lib || true
	@touch $@
