"""`paceline generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.decoding import complete, describe, ignore, leave_if_cancelled, open_pair
from paceline.cli.output import Transcript, note, summary, write_json
from paceline.core.errors import RequestError
from paceline.core.types import SamplingParams
from paceline.target.pull import DEFAULT_TARGET

app = typer.Typer()


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; '-' reads it from stdin, less its last newline.")
    ],
    target: options.Target = DEFAULT_TARGET,
    drafter: options.Drafter = "auto",
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    block_size: options.BlockSize = None,
    tree_nodes: options.TreeNodes = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    backend: options.Backend = "auto",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, no chat template.")
    ] = False,
    ignore_eos: options.IgnoreEos = False,
    stream: Annotated[bool, typer.Option(help="Print the text while it grows, or at the end.")] = True,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Answer one prompt.

    On a terminal, green is what the drafter guessed and the target confirmed."""
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos
    )
    text = read_prompt(prompt)
    llm = open_pair(
        target,
        drafter,
        block_size=block_size,
        tree_nodes=tree_nodes,
        device=device,
        dtype=dtype,
        backend=backend,
        offline=offline,
    )
    prompt_ids = llm.codec.encode(text) if raw else llm.render(text)
    transcript = Transcript(llm.codec)
    shown = stream and not as_json
    completion = complete(llm, prompt_ids, params, show=transcript.show if shown else ignore)
    if as_json:
        write_json({**completion.to_dict(), "pair": describe(llm, drafter)})
    else:
        transcript.finish(completion.text)
        note(summary(completion))
    leave_if_cancelled(completion)


def read_prompt(prompt: str) -> str:
    """Returns the prompt, from stdin where it is "-".

    Raises:
        RequestError: no text, or bytes that are not UTF-8.
    """
    text = _read_stdin() if prompt == "-" else prompt
    if not text.strip():
        raise RequestError(
            "prompt: expected some text, got none; hint: pass it as an argument, or '-' and on stdin"
        )
    return text


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"prompt: stdin is not UTF-8 text (byte {error.start}); hint: convert it"
        ) from error
