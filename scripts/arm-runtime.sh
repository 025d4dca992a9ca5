#!/bin/sh
# TVM's runtime for 64-bit ARM: fetch its wheels for the versions that are installed here, and unpack what a program needs to run.
# Prints the folder, which holds libtvm_runtime.so, libtvm_ffi.so and include/. The arguments are the Python to ask and the folder to
# make (default: in the user's cache). Does nothing where it is there.
set -eu
python=${1:-python3}
version=$("$python" -c 'from importlib.metadata import version as v; print(v("apache-tvm"), v("apache-tvm-ffi"))')
tvm=${version% *}
ffi=${version#* }
folder=${2:-${XDG_CACHE_HOME:-$HOME/.cache}/khtst-compile/aarch64/tvm-$tvm-ffi-$ffi}
if [ ! -d "$folder" ]; then
  mkdir -p "$(dirname "$folder")"
  made=$(mktemp -d "$folder.XXXXXX")
  trap 'rm -rf "$made"' EXIT
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$made" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_24_aarch64 --python-version 3.11 \
    "apache-tvm==$tvm" "apache-tvm-ffi==$ffi" >&2
  "$python" - "$made" << 'UNPACK'
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
for wheel in sorted(folder.glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            base = name.rpartition("/")[2]
            if base in ("libtvm_runtime.so", "libtvm_ffi.so"):
                (folder / base).write_bytes(archive.read(name))
            elif name.startswith("tvm_ffi/include/") and base:
                target = folder / name.removeprefix("tvm_ffi/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    wheel.unlink()
UNPACK
  mv -T "$made" "$folder" 2> /dev/null || [ -d "$folder" ]
fi
echo "$folder"
