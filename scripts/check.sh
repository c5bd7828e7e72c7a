#!/bin/sh
# Format, lint, import contracts and types. Goes on after a failure and fails at the end.
cd "$(dirname "$0")/.." || exit 1
status=0
for tool in "ruff format --check ." "ruff check ." "lint-imports" "basedpyright"; do
    echo "== $tool"
    # shellcheck disable=SC2086  # the words of a command
    .venv/bin/$tool || status=1
done
exit $status
