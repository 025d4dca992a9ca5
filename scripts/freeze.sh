#!/bin/sh
# Print constraints.txt: every package of the given Python's environment at its public version (torch's "+cpu" is a build, not a
# version, and would pin everyone to one index).
set -eu
echo "# The versions this release was tested with. \`make setup\` installs with them; regenerate with \`make constraints\`."
"$1" -m pip list --format=freeze --exclude-editable --disable-pip-version-check |
  grep -viE '^(pip|khtst-compile)==' | sed -E 's/^([^=]+==[^+]+)\+.*/\1/' | LC_ALL=C sort -f
