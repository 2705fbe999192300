# Everything runs in .venv, which `make setup` creates from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
# pyright is pinned; it need not ask the network for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: setup test train figures matrix versions fuzz opdb pictures docs notebook format clean FORCE

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install setuptools -c constraints.txt
	$(BIN)/python -m pip install --no-build-isolation -e '.[dev,solver,models,rl,docs]' -c constraints.txt
	touch $(STAMP)

# What continuous integration runs.
test: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/pytest -q --hypothesis-profile=ci -n logical --maxprocesses 8 --dist worksteal

# The main job: a language model on eight simulated ranks, beside the same steps on one device.
train: setup
	$(BIN)/python -m meshwright train

# Measure all figures, and write docs/figures.md and the README's table; takes long.
figures: setup
	$(BIN)/python -m benchmarks.figures

# Models that others wrote, under every setting; takes hours.
matrix: setup
	$(BIN)/python -m benchmarks.matrix --kept benchmarks/matrix.json --page docs/matrix.md

# The suite on other releases of torch, each in an environment of its own: pyproject.toml says which are meant to work.
# They bring gigabytes of CUDA libraries along, which the tests do not need.
TORCH := 2.11.0 2.15.0
versions: $(TORCH:%=out/torch-%)

out/torch-%: FORCE
	test -x $@/bin/python || $(PYTHON) -m venv $@
	grep -v "^torch==\|^setuptools==" constraints.txt > $@/constraints.txt
	echo torch==$* >> $@/constraints.txt
	$@/bin/python -m pip install -e '.[dev,solver,models,rl,docs]' -c $@/constraints.txt
	$@/bin/pytest -q --hypothesis-profile=ci -n logical --maxprocesses 8 --dist worksteal

FORCE:

# The long sweeps.
fuzz opdb: setup
	$(BIN)/python -m benchmarks $@

# The page of all schedules, its pictures, that of overlapped steps, and (by Chromium) those of the report.
pictures: setup
	$(BIN)/python docs/schedule_pages.py
	PYTHONPATH=. $(BIN)/python docs/overlap_picture.py
	PYTHONPATH=. $(BIN)/python docs/report_pictures.py

# The site, in out/site; open out/site/index.html. (The variable silences an advertisement.)
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The tutorial, run again, with its outputs stored.
notebook: setup
	$(BIN)/python docs/run_notebook.py

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf build dist out/site out/device .pytest_cache .ruff_cache .hypothesis src/*.egg-info
