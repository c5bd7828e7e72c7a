#!/bin/sh
# Removes what can be made again. The data of `make up` and finished clips stay.
set -eu
cd "$(dirname "$0")/.."
rm -rf .venv .state/demo dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
find api cli core kernels migrations tests worker -name __pycache__ -type d -prune -exec rm -rf {} +
