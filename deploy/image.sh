#!/bin/sh
# The steps of the Dockerfile, which calls this script. `make image-steps` runs the same steps in a clean virtual
# environment, for machines where no image can be built.
set -eu
unset PYTHONPATH PIP_CONSTRAINT

build() { # SOURCES WHEELS: the wheel, from a copy of the sources
    "${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir "$2" "$1"
}

install() { # PYTHON WHEELS CONSTRAINTS: the wheel, and what runs, federations, tables and verification need
    wheel=$(ls "$2"/sordino-*.whl)
    "$1" -m pip install --quiet --no-cache-dir --constraint "$3" "$wheel[flower,tables,verify]"
}

smoke() { # BIN FOLDER: one run, its verification, and a federation of three sites
    cd "$2"
    timed "$1/sordino" run --set rounds=10 --out one
    timed "$1/sordino" verify one
    timed "$1/sordino" federate up --sites 3 --out three
}

timed() {
    start=$(date +%s)
    "$@"
    echo "[$(($(date +%s) - start)) s] $(basename "$1") $(shift; echo "$@")"
}

everything() { # SOURCES FOLDER
    case $(cd "$2" && pwd)/ in
        "$(cd "$1" && pwd)"/*) echo "the folder $2 must lie outside the sources" >&2; exit 2 ;;
    esac
    mkdir -p "$2/wheels" "$2/sources" "$2/work"
    (cd "$1" && tar --exclude=./.git --exclude=./.venv --exclude=./build --exclude=./runs -cf - .) | tar -xf - -C "$2/sources"
    timed build "$2/sources" "$2/wheels"
    "${PYTHON:-python3}" -m venv "$2/venv"
    timed install "$2/venv/bin/python" "$2/wheels" "$2/sources/constraints.txt"
    rm -rf "$2/sources"
    smoke "$2/venv/bin" "$2/work"
}

step=$1
shift
"$step" "$@"
