#!/bin/sh
# Make .venv with requirements.txt and the library in it: `tools/make_venv.sh FOLDER [PYTHON]`.
# PYTHON is taken if it is given, else the first of the interpreters below that runs and is 3.11 to 3.13.
set -eu
venv=$1
least=3.11 most=3.13

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }  # a pyenv shim may not run
suits() { case $(version "$1") in 3.11 | 3.12 | 3.13) return 0 ;; *) return 1 ;; esac; }

if [ -n "${2:-}" ]; then
    suits "$2" || { echo "PYTHON=$2 is Python $(version "$2"); the book needs $least to $most." >&2; exit 1; }
    python=$2
else
    python='' found=''
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if [ -n "$(version "$candidate")" ]; then found="$found $candidate ($(version "$candidate"))"; fi
        if suits "$candidate"; then python=$candidate; break; fi
    done
    if [ -z "$python" ]; then
        echo "The book needs Python $least to $most. Found:${found:- no Python at all}." >&2
        echo "Install one, or name one: make PYTHON=/path/to/python3.11 ..." >&2
        exit 1
    fi
fi

# a folder that was moved, or that a failed attempt has left, is made again
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "Making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || {
        echo "No venv from $python. On Debian and Ubuntu: apt install $(basename "$python")-venv" >&2
        rm -rf "$venv"
        exit 1
    }
fi
suits "$venv/bin/python" || { echo "$venv has Python $(version "$venv/bin/python"): remove it, then try again." >&2; exit 1; }

"$venv/bin/python" -m pip install --disable-pip-version-check -r requirements.txt
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
