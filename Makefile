# The habits. `make demo` and `make test` do all the set-up they need, on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The environment of this repository is pinned to one torch; the package itself takes a range.
TORCH ?= torch==2.13.0
STAMP := $(VENV)/.installed
# Kernels that the demo uses are compiled once, as a part of the set-up, and again when their sources have changed.
COMPILED := $(VENV)/.compiled
KERNELS := $(wildcard src/gradwire/kernels/cpu/*.py src/gradwire/compressors/*.py src/gradwire/lang/targets/numba/*.py)
# The training frameworks have an environment of their own: they are large, and bring versions of what others need.
TRAINERS ?= .venv-trainers
# So does the documentation site, which needs neither torch nor gradwire.
DOCS ?= .venv-docs
# And what builds and checks the package. The wheel is then used in one more, which has nothing else.
PACKAGING ?= .venv-packaging
WHEELS := build/dist
# Versions of Python that types are checked for. Only the one at hand is run.
PYTHONS := 3.12 3.13 3.14
# The types of NumPy 2.3 and newer are for Python 3.11 and newer. Under 3.10, most of its types are unknown.
WITHOUT_NUMPY := --no-warn-return-any --no-warn-unused-ignores --disable-error-code misc
HOURS ?= 1
RUNS ?= 200
SEED ?= 0
# Tests that mostly compile kernels are handed out one by one; the others start processes, and go file by file.
COMPILING := tests/compressors tests/contracts tests/golden tests/kernels tests/lang

.PHONY: demo test ci docs package test-trainers test-peer test-long test-repeat soak lint lint-versions format bench golden clean help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(COMPILED) ## train with 4 ranks over a 100 Mb/s network, dense against compressed, and write a report
	$(BIN)/gradwire demo

test: $(STAMP) ## the suite, which compiles all kernels when it first runs
	$(BIN)/python -m pytest -q -n 2 --dist worksteal $(COMPILING)
	$(BIN)/python -m pytest -q -n 3 --dist loadfile $(COMPILING:%=--ignore=%)

ci: test ## what a change must pass: the suite, the longer tests, and campaigns in a short form
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m ci
	$(BIN)/python -m tests.fuzz --cases 2000
	$(BIN)/python -m tests.schedules --schedules 500
	$(MAKE) test-trainers
	$(MAKE) docs

test-trainers: $(TRAINERS)/.installed ## gradwire.trainers and its examples with the real accelerate, transformers and lightning
	$(TRAINERS)/bin/python -m pytest -q -m frameworks tests/trainers tests/docs/test_blocks.py

test-peer: $(STAMP) ## torch's own tests of DDP on CPU with gradwire attached, with 2 and 3 ranks, against the same tests without it
	$(BIN)/python -m tests.peer

test-long: $(STAMP) ## the long campaigns: a million fuzz cases a decoder, and as many that coverage guides, 100,000 schedules of faults for the aggregator in Python and for the one in the kernel (root), damage to every byte of a server's files, 200 runs of the README's example, properties on new examples, and the tests marked slow
	$(BIN)/python -m tests.fuzz --cases 1000000
	$(BIN)/python -m tests.fuzz.guided --cases 1000000
	$(BIN)/python -m tests.schedules --schedules 100000
	$(BIN)/python -m tests.schedules --xdp --schedules 100000 --record build/xdp.jsonl
	$(BIN)/python -m tests.damage
	$(BIN)/python -m tests.integration.readme_example --runs 200
	$(BIN)/python -m pytest -q -n 2 --timeout 1200 -m hypothesis --hypothesis-profile campaign
	$(BIN)/python -m pytest -q -m slow

test-repeat: $(STAMP) ## RUNS=N HOURS=N: each test of a fault N times over its forms, on a busy machine; goes on where the last sitting ended
	$(BIN)/python -m tests.repeat --runs $(RUNS) --hours $(HOURS)

soak: $(STAMP) ## HOURS=N SEED=S: jobs in the lab whose processes are killed, frozen and restarted, with every value checked (root)
	$(BIN)/python -m tests.soak --hours $(HOURS) --seed $(SEED)

docs: $(DOCS)/.installed ## build the documentation site into build/site; a warning or a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "The site is in build/site: open build/site/index.html, or run python3 -m http.server -d build/site"

package: $(PACKAGING)/.installed ## wheel and sdist, checked; the wheel trains on two ranks in an environment of its own; types for other Pythons
	rm -rf $(WHEELS) build/clean
	$(PACKAGING)/bin/python -m build --outdir $(WHEELS) .
	$(PACKAGING)/bin/python -m twine check --strict $(WHEELS)/*
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	build/clean/bin/python -m pip install --quiet --disable-pip-version-check "$$(echo $(WHEELS)/*.whl)[cli]"
	build/clean/bin/python tests/packaging/installed.py
	$(MAKE) lint-versions

lint-versions: $(STAMP) ## types for the versions of Python that are not run
	for version in $(PYTHONS); do $(BIN)/mypy --python-version $$version || exit 1; done
	$(BIN)/mypy --python-version 3.10 $(WITHOUT_NUMPY)

lint: $(STAMP) ## format check, linter, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples/*.py
	$(BIN)/lint-imports

format: $(STAMP) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## kernels and training, with CSV under benchmarks/results
	$(BIN)/gradwire bench kernels
	$(BIN)/gradwire bench training

golden: $(STAMP) ## rewrite the golden files, after a deliberate change of a format or of generated code
	$(BIN)/python -m tests.golden.update

clean: ## remove the environment and what was built
	rm -rf $(VENV) $(TRAINERS) $(DOCS) $(PACKAGING) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[cli,report,test,dev]"
	touch $@

$(COMPILED): $(STAMP) $(KERNELS)
	@echo "Compiling the kernels of the demo, once; this takes one to two minutes."
	$(BIN)/python -m gradwire.bench.demo
	touch $@

$(PACKAGING)/.installed: pyproject.toml
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --quiet --disable-pip-version-check build twine
	touch $@

$(TRAINERS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[trainers]" pytest pytest-timeout hypothesis scikit-learn
	touch $@

# Only the packages of the extra: pages are made from source, without importing it. Reading pyproject.toml takes Python 3.11.
$(DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(PYTHON) -c "import tomllib as t; print(*t.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r $(DOCS)/requirements.txt
	touch $@
