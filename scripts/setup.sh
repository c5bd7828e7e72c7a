#!/bin/sh
# Makes .venv with everything that Rushes, its demo and its tests need. Does nothing when that is done already;
# repeats itself when the lock, pyproject.toml or the interpreter changed, and after an interruption.
#
# PYTHON           interpreter to use (default: python3.11, or the first newer one that works)
# TORCH_INDEX_URL  where the CPU build of torch is looked for when pip's own configuration does not find it
set -eu
cd "$(dirname "$0")/.."
TORCH_INDEX_URL=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
VENV=.venv
STAMP=$VENV/.rushes-setup
UNFINISHED=$VENV/.rushes-setup-unfinished
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_USER=0

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

# What the environment must have been made from.
fingerprint() {
    "$VENV/bin/python" -c '
import hashlib, os, sys
print(sys.version, os.getcwd())
for name in ("requirements/cpu.lock", "requirements/openai2.lock", "pyproject.toml", "scripts/setup.sh"):
    print(hashlib.sha256(open(name, "rb").read()).hexdigest(), name)'
}

is_done() { [ -f "$STAMP" ] && fingerprint 2>/dev/null | cmp -s - "$STAMP"; }

is_done && exit 0
# two at once would take each other's environment away
if command -v flock >/dev/null 2>&1; then
    exec 9<.
    flock -n 9 || { say "another one is at work in this directory: waiting for it"; flock 9; }
    is_done && exit 0
fi

# The first interpreter of version 3.11 or newer that can make virtual environments.
find_python() {
    reason="no Python 3.11 or newer was found"
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13 python3.14 python}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            python=$candidate
            return
        fi
        reason="$candidate lacks the modules venv and ensurepip (on Debian and Ubuntu: apt install python3-venv)"
    done
    fail "$reason; name another interpreter with PYTHON=..."
}

# an interrupted installation can leave a package that pip takes for complete
if [ -f "$UNFINISHED" ] || ! "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    find_python
    say "making $VENV with $python ($("$python" -c 'import platform; print(platform.python_version())'))"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
fi
rm -f "$STAMP"
touch "$UNFINISHED"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# The lock is complete, so pip need not resolve anything: --no-deps.
pip_install() { "$VENV/bin/python" -m pip install -qq --no-deps "$@"; }

# torch apart from the rest: the CPU build is not on PyPI, and its hash is that of one platform.
awk '/^torch==/ {found = 1; print; next} found && /^ / {print; next} {found = 0}' requirements/cpu.lock >"$work/torch.lock"
awk '/^torch==/ {found = 1; next} found && /^ / {next} {found = 0; print}' requirements/cpu.lock >"$work/rest.lock"
torch=$(awk '/^torch==/ {print $1}' "$work/torch.lock")
[ -n "$torch" ] || fail "requirements/cpu.lock names no torch"

platform=$("$VENV/bin/python" -c 'import platform, sys; print(*sys.version_info[:2], platform.machine())')
say "installing $torch (about 200 MB)"
if [ "$platform" = "3 11 x86_64" ]; then
    pip_install --require-hashes -r "$work/torch.lock" 2>"$work/error" ||
        pip_install --require-hashes -r "$work/torch.lock" --index-url "$TORCH_INDEX_URL" 2>>"$work/error" ||
        { cat "$work/error" >&2; fail "$torch was found neither by pip's own configuration nor at $TORCH_INDEX_URL"; }
else
    say "NOTE: the lock holds the hash of torch for Python 3.11 on x86_64; here torch is installed without a hash"
    pip_install "$torch" 2>"$work/error" ||
        pip_install "$torch" --index-url "$TORCH_INDEX_URL" 2>>"$work/error" || {
        say "NOTE: no CPU build of torch was found for this Python; taking the general build (gigabytes with CUDA)"
        "$VENV/bin/python" -m pip install -qq "${torch%+cpu}" 2>>"$work/error" ||
            { cat "$work/error" >&2; fail "no build of ${torch%+cpu} was found for this Python"; }
    }
fi

say "installing the other packages of requirements/cpu.lock (about a minute)"
pip_install --require-hashes -r "$work/rest.lock"
pip_install --no-build-isolation -e .
# apart from the newer line: programs that need it have this directory in PYTHONPATH
rm -rf "$VENV/openai2"
pip_install --require-hashes --target "$VENV/openai2" -r requirements/openai2.lock
"$VENV/bin/python" -m pip check >"$work/check" || { cat "$work/check" >&2; fail "the installed packages do not fit"; }

fingerprint >"$work/stamp"
rm "$UNFINISHED"
mv "$work/stamp" "$STAMP"
say "done"
