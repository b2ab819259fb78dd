# Recipes of logitwire. Without just on this machine: ./ops/just RECIPE

python := ".venv/bin/python"

# List the recipes
default:
    @just --list

# Make .venv and install the project, if that is not up to date
[group('work')]
setup:
    @python3 ops/bootstrap.py

# Serve MODEL_NAME, or the embedded SmolLM2; settings come from the environment, see ops/serve.sh --help
[group('run')]
serve:
    @exec ops/serve.sh

# Serve a scripted model that costs nothing; SCRIPT is what it says
[group('run')]
serve-fake:
    @MODEL_NAME=scripted exec ops/serve.sh

# Check Python, torch, GPUs, memory, port and cache for the settings; says what to do
[group('run')]
doctor:
    @exec ops/serve.sh --check

# All tests, fast ones first
[group('check')]
test *args: setup
    {{python}} -m pytest {{args}}

# Only the tests that load models
[group('check')]
test-model *args: setup
    {{python}} -m pytest -m model {{args}}

# Format the code
[group('work')]
fmt: setup
    {{python}} -m ruff format
    {{python}} -m ruff check --fix

# Style and likely mistakes
[group('check')]
lint: setup
    {{python}} -m ruff format --check
    {{python}} -m ruff check

# Strict types
[group('check')]
types: setup
    {{python}} -m mypy

# One-way dependencies between the rooms
[group('check')]
imports: setup
    .venv/bin/lint-imports

# Paths, recipes and the settings table that the documents name
[group('check')]
docs: setup
    {{python}} -m ops.check_docs

# Throw what no client should send at a server: from the OpenAPI document, and raw bytes
[group('check')]
fuzz *args: setup
    {{python}} -m ops.fuzz {{args}}

# Everything that must hold before a commit
[group('check')]
check: lint types imports docs test

# Measure against the bars, and write bench-results.json
[group('run')]
bench *args: setup
    {{python}} -m ops.bench {{args}}
