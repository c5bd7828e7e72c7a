#!/bin/sh
# Resolves requirements/cpu.lock, every package that the CPU set-up needs, and requirements/openai2.lock, those of the
# older openai SDK: each at one version, with hashes.
#
# FIND_LINKS  directory or page that has the CPU build of torch (default: PyTorch's CPU index)
set -eu
cd "$(dirname "$0")/.."
TORCH_INDEX_URL=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
FIND_LINKS=${FIND_LINKS:-$TORCH_INDEX_URL/torch/}
command -v uv >/dev/null || { echo "make lock needs uv: pip install uv" >&2; exit 1; }

compile() {
    output=requirements/$1
    shift
    # uv prefers what an existing output pins
    rm -f "$output"
    uv pip compile --quiet "$@" --python-version 3.11 --generate-hashes \
        --no-emit-find-links --no-emit-index-url --no-header --output-file "$output"
}

compile cpu.lock pyproject.toml requirements/cpu.in --find-links "$FIND_LINKS" \
    --extra api --extra client --extra worker --extra webhooks --extra local --extra dev
compile openai2.lock requirements/openai2.in
