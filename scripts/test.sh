#!/bin/sh
# Runs all tests: those that only compute beside those that start servers, which wait more than they compute. The report
# of the first comes whole after that of the second. With arguments: one pytest that gets them.
set -u
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || exec .venv/bin/pytest "$@"

SERVERS="tests/integration tests/e2e tests/faults"
OTHERS=$(printf ' --ignore %s' $SERVERS)

# A shell without job control has what it starts in the background ignore Ctrl-C, and their children with them.
HEED='import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
interrupted=0
# a terminal sends Ctrl-C to everything that it runs
trap 'interrupted=130' INT
trap 'interrupted=143; kill -INT ${computing-} ${servers-} 2>/dev/null' TERM HUP

# shellcheck disable=SC2086  # lists of words
nice -n 10 .venv/bin/python -c "$HEED" .venv/bin/pytest -p no:cacheprovider $OTHERS >"$work/computing" 2>&1 &
computing=$!
# shellcheck disable=SC2086
.venv/bin/python -c "$HEED" .venv/bin/pytest $SERVERS &
servers=$!

# The exit status of a child, however often a signal interrupts the waiting.
status_of() {
    while :; do
        wait "$1"
        status=$?
        kill -0 "$1" 2>/dev/null || return $status
    done
}

status_of $servers
servers_status=$?
status_of $computing
computing_status=$?
cat "$work/computing"
for status in $interrupted $servers_status $computing_status; do
    [ "$status" -eq 0 ] || exit "$status"
done
