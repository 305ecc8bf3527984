#!/usr/bin/env bash
# Sets up a virtual environment and runs every check: lint, types, and tests with real TensorRT-RTX builds.
# PYTHON names the interpreter, VENV the environment's folder; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
"$venv/bin/python" -m pip install --quiet -e '.[rtx,dev]'
"$venv/bin/python" scripts/fetch_test_models.py
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
"$venv/bin/python" -m pytest -n "$(nproc)" "$@"
