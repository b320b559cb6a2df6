"""`paceline chat`: a conversation in the terminal, or one answer for each line of stdin."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.decoding import complete, describe, ignore, open_pair
from paceline.cli.output import Transcript, note, say_error, summary, write_json
from paceline.cli.sampling import Sampling
from paceline.core.errors import CapacityError, PacelineError, RequestError
from paceline.core.params import SamplingParams
from paceline.core.types import Completion

if TYPE_CHECKING:
    from paceline.llm import LLM

app = typer.Typer()

_HELP = "/reset forgets the conversation, /stats shows its numbers, /exit or Ctrl-D leaves"


@options.command(app)
def chat(
    sampling: Sampling,
    pair: options.Pair,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    max_new_tokens: options.MaxNewTokens = 512,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON line an answer, words on stderr.")
    ] = False,
) -> None:
    """Talk with the target.

    /reset forgets, /stats counts, /exit or Ctrl-D leaves, Ctrl-C stops an answer.

    Lines come from stdin, so a script can talk too; then exit code 1 says that a line had no answer.
    """
    params = sampling.params(as_json=as_json, max_new_tokens=max_new_tokens)
    llm = open_pair(pair)
    params = sampling.for_target(params, llm)
    conversation = Conversation(llm, params, system, drafter=pair.drafter, as_json=as_json)
    interactive = sys.stdin.isatty()
    if interactive:
        note(_HELP)
    num_failed = 0
    while (line := read_line(interactive)) is not None and line != "/exit":
        num_failed += not conversation.take(line)
    if num_failed and not interactive:
        raise typer.Exit(1)


class Conversation:
    """The messages so far, and what became of them.

    Args:
        llm, params: who answers, and how.
        system: system message, or `None`.
        drafter: as the option has it.
        as_json: print JSON lines.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, *, drafter: str, as_json: bool
    ) -> None:
        self._llm, self._params, self._as_json = llm, params, as_json
        self._pair = describe(llm, drafter)
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)
        self.completions: list[Completion] = []

    def take(self, line: str) -> bool:
        """Answers a line or obeys a command, and returns whether it could. Mutates: messages, completions."""
        try:
            if line.startswith("/"):
                return self._obey(line)
            if line.strip():
                self._answer(line)
        except CapacityError as error:
            say_error(f"{error}, or /reset")
            return False
        except PacelineError as error:
            say_error(str(error))
            return False
        return True

    def _obey(self, command: str) -> bool:
        if command == "/reset":
            self.messages = list(self._opening)
            note("forgotten")
        elif command == "/stats":
            note(statistics(self.completions))
        else:
            say_error(f"unknown command {command.split()[0]}; {_HELP}")
            return False
        return True

    def _answer(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        transcript = Transcript(self._llm.codec)
        show = ignore if self._as_json else transcript.show
        completion = complete(self._llm, self._llm.render(asked), self._params, show=show)
        if completion.finish_reason == "error":
            raise RequestError(str(completion.stop_reason))
        self.completions.append(replace(completion, request_id=f"answer-{len(self.completions)}"))
        self.messages = [*asked, {"role": "assistant", "content": completion.text}]
        if self._as_json:
            write_json({**self.completions[-1].to_dict(), "pair": self._pair}, indent=None)
        else:
            transcript.finish(completion.text)
            if not sys.stdout.isatty():
                sys.stdout.write("\n")
            note(summary(completion))


def statistics(completions: list[Completion]) -> str:
    """Returns the conversation's numbers in words: τ pooled over all steps, speed after the first tokens."""
    from paceline.core.acceptance import acceptance_length

    num_tokens = sum(len(c.token_ids) for c in completions)
    num_after_first = sum(max(0, len(c.token_ids) - 1) for c in completions)
    seconds = sum(c.decode_s for c in completions)
    tau = acceptance_length([step for c in completions for step in c.steps])
    parts = [f"answers {len(completions)} · tokens {num_tokens}"]
    if tau is not None and seconds > 0:
        parts.append(f"τ {tau:.2f} · {num_after_first / seconds:.1f} tok/s")
    return " · ".join(parts)


def read_line(interactive: bool) -> str | None:
    """Returns the next line without its end, or `None` where there is none; Ctrl-C at the prompt clears the line."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
    while True:
        try:
            return _ask()
        except KeyboardInterrupt:
            note(f"\n{_HELP}")
        except EOFError:
            note("")
            return None


def _ask() -> str:
    if sys.stdout.isatty():
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  # gives input() its line editing
        return input("> ")
    sys.stderr.write("> ")
    sys.stderr.flush()
    return input()
