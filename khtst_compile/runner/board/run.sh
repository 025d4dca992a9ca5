#!/bin/sh
# The model this folder lies in, on this machine: ./run.sh verify | bench | run IN.npz OUT.npz | info, and options of ./khtst-run --help.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
program=$here/khtst-run
[ ! -x "$here/build/khtst-run" ] || program=$here/build/khtst-run # built here, for this system
case "${1:---help}" in
  -*) exec "$program" "${1:---help}" ;;
esac
verb=$1
shift
exec "$program" "$verb" "$(dirname -- "$here")" --libraries "$here/lib" "$@"
