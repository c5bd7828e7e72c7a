#!/bin/sh
# Runs all tests in three parts at once: those that mostly compute beside those that mostly wait, for a server or for
# workers. Each has servers, ports and folders of its own. The reports of the last two come whole after that of the first,
# and at the end what failed in any of them.
# Tests marked `long` are left out. With arguments: one pytest that gets them.
set -u
cd "$(dirname "$0")/.."
# tests start hundreds of processes: each would compile all of Rushes again
unset PYTHONDONTWRITEBYTECODE
[ $# -eq 0 ] || exec .venv/bin/pytest "$@"

WAITING="tests/integration tests/faults"
WORKERS="$(echo tests/integration/test_worker_*.py) tests/integration/test_node_backlog.py tests/faults"
FUZZ=tests/integration/test_api_fuzz.py
COMPUTING=$FUZZ
for folder in tests/*/; do
    folder=${folder%/}
    case " $WAITING " in
        *" $folder "*) ;;
        *) [ -z "$(find "$folder" -name 'test_*.py')" ] || COMPUTING="$COMPUTING $folder" ;;
    esac
done

# A shell without job control has what it starts in the background ignore Ctrl-C, and their children with them.
HEED='import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
interrupted=0
# a terminal sends Ctrl-C to everything that it runs
trap 'interrupted=130' INT
trap 'interrupted=143; kill -INT ${computing-} ${workers-} ${waiting-} 2>/dev/null' TERM HUP

# shellcheck disable=SC2086  # lists of words
nice -n 10 .venv/bin/python -c "$HEED" .venv/bin/pytest -p no:cacheprovider -m 'not long' $COMPUTING >"$work/computing" 2>&1 &
computing=$!
# shellcheck disable=SC2086
.venv/bin/python -c "$HEED" .venv/bin/pytest -p no:cacheprovider -m 'not long' $WORKERS >"$work/workers" 2>&1 &
workers=$!
ignored="--ignore $FUZZ"
for path in $WORKERS; do ignored="$ignored --ignore $path"; done
mkfifo "$work/pipe"
tee "$work/waiting" <"$work/pipe" &
shown=$!
# shellcheck disable=SC2086
.venv/bin/python -c "$HEED" .venv/bin/pytest -m 'not long' $ignored tests/integration >"$work/pipe" 2>&1 &
waiting=$!

# The exit status of a child, however often a signal interrupts the waiting.
status_of() {
    while :; do
        wait "$1"
        status=$?
        kill -0 "$1" 2>/dev/null || return $status
    done
}

status_of $waiting
waiting_status=$?
status_of $workers
workers_status=$?
status_of $computing
computing_status=$?
# what a test left behind may still hold the other end
{ sleep 5 && kill $shown; } 2>/dev/null &
status_of $shown
kill $! 2>/dev/null
cat "$work/workers" "$work/computing"
grep -hE '^(FAILED|ERROR) ' "$work/waiting" "$work/workers" "$work/computing" && echo 'make test: the tests named above failed'
for status in $interrupted $waiting_status $workers_status $computing_status; do
    [ "$status" -eq 0 ] || exit "$status"
done
