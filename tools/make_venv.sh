#!/usr/bin/env bash
# Makes a virtual environment if it is missing, installs a requirements file into it, and prints
# the path of its interpreter on standard output (everything else goes to standard error).
#
#   tools/make_venv.sh requirements.txt
#
# VENV    where the environment is or will be   (default: .venv in the repository)
# PYTHON  interpreter to make it with           (default: python3)
# TORCH   version of torch to use instead of the pinned one, such as 2.11.0, the oldest that is supported
# A second run with the same requirements and TORCH installs nothing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
requirements=$root/${1:?usage: tools/make_venv.sh REQUIREMENTS_FILE}
venv=${VENV:-$root/.venv}
python=${PYTHON:-python3}

if [ ! -x "$venv/bin/python" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "error: '$python' is not a Python 3.10 or newer; set PYTHON to one that is" >&2
        exit 2
    fi
    echo "Making a virtual environment in $venv" >&2
    if ! "$python" -m venv "$venv" >&2; then
        echo "error: '$python -m venv' failed; install Python's venv module, or set PYTHON to another interpreter" >&2
        exit 2
    fi
fi

name=$(basename "$requirements" .txt)
stamp=$venv/.installed-$name
wanted="$(cat "$root"/requirements*.txt | cksum)${TORCH:+ torch $TORCH}"
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    echo "Installing $name.txt into $venv (once; some minutes)" >&2
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar on \
        -r "$requirements" >&2
    if [ -n "${TORCH:-}" ]; then
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "torch==$TORCH" >&2
    fi
    echo "$wanted" >"$stamp"
fi
echo "$venv/bin/python"
