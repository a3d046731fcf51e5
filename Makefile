# `make test` is the README's test command; `make check` is what CI runs.
PYTHON ?= python

.PHONY: test lint format types check bench
test:
	$(PYTHON) -m pytest -n 2

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types:
	$(PYTHON) -m mypy

check: lint types test

bench:
	$(PYTHON) benchmarks/quadratic_speed.py
	$(PYTHON) benchmarks/mixture_speed.py --growth
