"""`khtst-compile generate`."""

from __future__ import annotations

from pathlib import Path

import click

from khtst_compile.cli.console import Console, common


@click.command("generate")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="The text to go on with.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens to add at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Draw from so many most likely tokens; 0: from all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Draw from the most likely tokens that reach this.")
@click.option("--stop", multiple=True, help="End before this text; repeatable.")
@click.option("--ignore-end", is_flag=True, help="Go on past the model's own end token.")
@common
def command(
    console: Console,
    artifact: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    stop: tuple[str, ...],
    ignore_end: bool,
) -> None:
    """Go on with a text by ARTIFACT, a language model folder written by `lower`. Text appears as it is made."""
    from khtst_compile import runtime

    running = runtime.load(artifact, threads=console.threads).generate(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=console.seed,
        stop=stop,
        ignore_end=ignore_end,
    )
    texts, ids = [], []
    for step in running:
        texts.append(step.text)
        ids.append(int(step.ids[0]))
        if not console.json:
            click.echo(step.text, nl=False)
    rates = running.rates()
    summary = {"prompt": prompt, "text": "".join(texts), "ids": ids, **rates}
    console.note(
        f"{running.prompt_tokens} prompt tokens at {rates['prefill_tokens_per_s']:.1f} a second, {running.new_tokens} new ones at "
        f"{rates['decode_tokens_per_s']:.1f}"
    )
    console.emit(summary, "")
