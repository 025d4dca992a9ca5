"""`python -m khtst_compile`: the command line without its entry point."""

from khtst_compile.cli import main

main()
