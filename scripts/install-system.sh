#!/bin/sh
# What pip cannot install: a C++ compiler (TVM links the libraries it builds with one) and Python's venv module, which Debian packs apart.
# Does nothing where both are there. The arguments are the Python to check and, for the ARM targets and their tests, "arm": a cross
# compiler, an emulator and models of processors as well.
set -eu
python=${1:-python3}
packages=""
command -v "$python" > /dev/null || packages="$packages python3"
command -v g++ > /dev/null || command -v clang++ > /dev/null || command -v gcc > /dev/null || packages="$packages g++"
"$python" -c 'import ensurepip, venv' 2> /dev/null || packages="$packages python3-venv"
if [ "${2:-}" = arm ]; then
  command -v aarch64-linux-gnu-g++ > /dev/null || packages="$packages g++-aarch64-linux-gnu"
  command -v arm-linux-gnueabihf-gcc > /dev/null || packages="$packages gcc-arm-linux-gnueabihf libc6-dev-armhf-cross"
  command -v qemu-aarch64 > /dev/null || packages="$packages qemu-user"
  command -v llvm-mca-19 > /dev/null || packages="$packages llvm-19"
fi
[ -n "$packages" ] || exit 0
root=""
[ "$(id -u)" = 0 ] || root=sudo
if ! command -v apt-get > /dev/null; then
  echo "install-system: please install by hand:$packages (no apt-get here)" >&2
  exit 1
fi
if [ -n "$root" ] && ! command -v sudo > /dev/null; then
  echo "install-system: please ask an administrator for: apt-get install$packages" >&2
  exit 1
fi
echo "install-system: installing$packages" >&2
$root apt-get update -qq
# shellcheck disable=SC2086 # a list of packages
$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
