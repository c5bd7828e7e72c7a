#!/bin/sh
# Resolves requirements/cpu.lock: every package that the CPU set-up needs, at one version, with hashes.
#
# FIND_LINKS  directory or page that has the CPU build of torch (default: PyTorch's CPU index)
set -eu
cd "$(dirname "$0")/.."
TORCH_INDEX_URL=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
FIND_LINKS=${FIND_LINKS:-$TORCH_INDEX_URL/torch/}
command -v uv >/dev/null || { echo "make lock needs uv: pip install uv" >&2; exit 1; }

# uv prefers what an existing output pins
rm -f requirements/cpu.lock
uv pip compile --quiet pyproject.toml requirements/cpu.in \
    --extra api --extra worker --extra webhooks --extra local --extra dev \
    --python-version 3.11 --find-links "$FIND_LINKS" \
    --generate-hashes --no-emit-find-links --no-emit-index-url --no-header \
    --output-file requirements/cpu.lock
