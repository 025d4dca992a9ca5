"""The command line. One file per verb; each parses, calls one function and prints.

Data goes to standard output and everything else to standard error. Exit codes: 0 ok, 1 over budget, 2 usage, 3 unsupported model or
operator, 4 environment, 5 resources, 70 a bug in khtst-compile, 130 interrupted, 141 the reader of standard output went away,
143 terminated.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

import click

from khtst_compile import __version__
from khtst_compile.cli.failures import Terminated, exit_code_of

# verb -> (module that defines it, one line of help); strings, so that --help imports nothing
VERBS: dict[str, tuple[str, str]] = {
    "quantize": ("khtst_compile.cli.quantize", "Quantize a model to int8 by a recipe."),
    "lower": ("khtst_compile.cli.lower", "Compile a quantized model for a target."),
    "kernels": ("khtst_compile.cli.kernels", "Compile int8 layers as a C library for 32-bit ARM."),
    "export": ("khtst_compile.cli.export", "Write a quantized model as ONNX."),
    "split": ("khtst_compile.cli.split", "Cut a model with codebooks into an encoder and a decoder that talk in ids."),
    "verify": ("khtst_compile.cli.verify", "Compare an artifact with what it was made from, layer by layer."),
    "run": ("khtst_compile.cli.run", "Run a compiled model on arrays, or write the ids of its codebooks."),
    "decode": ("khtst_compile.cli.decode", "Turn ids of codebooks back into outputs."),
    "generate": ("khtst_compile.cli.generate", "Go on with a text by a compiled language model."),
    "perplexity": ("khtst_compile.cli.perplexity", "Judge how well a language model predicts a text."),
    "bench": ("khtst_compile.cli.bench", "Time a compiled model against torch and onnxruntime."),
    "inspect": ("khtst_compile.cli.inspect", "Show what an artifact holds."),
    "passes": ("khtst_compile.cli.passes", "List passes with their options, and the named recipes."),
    "targets": ("khtst_compile.cli.targets", "List targets and whether they can run here."),
    "doctor": ("khtst_compile.cli.doctor", "Check versions, CPU features and compilers."),
    "demo": ("khtst_compile.cli.demo", "The whole way on a real model, with a table at the end."),
}


class Verbs(click.Group):
    """Imports a verb's module when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="khtst-compile")
def cli() -> None:
    """Quantize PyTorch models to int8, lower them, and prove that they still compute the same thing.

    \b
    Exit codes: 0 ok, 1 over budget, 2 usage, 3 unsupported model or operator,
    4 environment, 5 resources, 70 a bug in khtst-compile, 130 interrupted, 143 terminated.
    """


def _terminate(number: int, frame: object) -> None:
    """SIGTERM as an exception: temporary folders are removed on its way up, which the default action leaves behind."""
    raise Terminated


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Read by OpenMP when torch loads. Its threads otherwise spin while they wait, and on a machine that does anything else two of them
    # were measured to take eight times as long as one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        result = cli.main(args=given, prog_name="khtst-compile", standalone_mode=False)
        sys.stdout.flush()
        code = result if isinstance(result, int) else 0
    except (BrokenPipeError, SystemExit):  # Click turns the one into the other
        # Python flushes standard output once more at exit: into nothing instead of into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # type: ignore[union-attr]
        sys.stdout = sys.__stdout__
        code = 141
    except (Exception, KeyboardInterrupt, Terminated) as error:  # every failure becomes one message and one code
        code = exit_code_of(error, given)
    sys.exit(code)
