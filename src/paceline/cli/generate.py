"""`paceline generate`: one prompt, one answer or several."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.decoding import complete_all, describe, ignore, leave_unless_finished, open_pair
from paceline.cli.input import read_prompt
from paceline.cli.output import Transcript, note, summary, write_json
from paceline.cli.sampling import Sampling
from paceline.core.types import Completion

app = typer.Typer()


@options.command(app)
def generate(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; '-' reads it from stdin, less its last newline.")
    ],
    sampling: Sampling,
    pair: options.Pair,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, no chat template.")
    ] = False,
    max_new_tokens: options.MaxNewTokens = 256,
    n: Annotated[
        int, typer.Option("--n", metavar="N", help="So many answers; above 1 they need a temperature.")
    ] = 1,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream", help="Print the text while it grows, as it does for one answer."
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Answer one prompt.

    On a terminal, green is what the drafter guessed and the target confirmed."""
    params = sampling.params(as_json=as_json, max_new_tokens=max_new_tokens, n=n)
    if stream and (as_json or n > 1):
        raise typer.BadParameter("only one text can grow, and not in --json", param_hint="--stream")
    text = read_prompt(prompt)
    llm = open_pair(pair)
    params = sampling.for_target(params, llm)
    prompt_ids = llm.codec.encode(text) if raw else llm.render(text)
    transcript = Transcript(llm.codec)
    grows = n == 1 and not as_json and stream is not False
    completions = complete_all(llm, prompt_ids, params, show=transcript.show if grows else ignore)
    if as_json:
        answers = [completion.to_dict() for completion in completions]
        found = answers[0] if n == 1 else {"completions": answers}
        write_json({**found, "pair": describe(llm, pair.drafter)})
    elif n == 1:
        transcript.finish(completions[0].text)
        note(summary(completions[0]))
    else:
        _print_all(completions)
    leave_unless_finished(*completions)


def _print_all(completions: list[Completion]) -> None:
    """Prints the texts, each with the end of its line, and behind each its number and summary."""
    for number, completion in enumerate(completions, 1):
        sys.stdout.write(completion.text if completion.text.endswith("\n") else f"{completion.text}\n")
        sys.stdout.flush()
        note(f"{number}/{len(completions)} · {summary(completion)}")
