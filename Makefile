# `make test` is the README's test command; `make check` is what CI runs.
PYTHON ?= python

.PHONY: test test-slow test-all lint format types check bench fuzz docs docs-linkcheck
test: # minutes
	$(PYTHON) -m pytest -n 2 -m "not slow"

test-slow: # the rest: chaos, whole experiments, many seeds
	$(PYTHON) -m pytest -n 2 -m slow

test-all: test test-slow

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types:
	$(PYTHON) -m mypy

check: lint types test-all

bench:
	$(PYTHON) benchmarks/quadratic_speed.py
	$(PYTHON) benchmarks/mixture_speed.py --growth

fuzz: # the property tests at length, and the attack
	$(PYTHON) -m pytest tests/test_properties.py --hypothesis-profile=long
	$(PYTHON) benchmarks/attack.py

docs: # the site, with every code block run; a warning is an error (PDVI_DOCS_RUN=off leaves the running out)
	$(PYTHON) -m sphinx -W --keep-going -b html docs docs/_build/html

docs-linkcheck: docs # links within the site
	$(PYTHON) docs/check_links.py
