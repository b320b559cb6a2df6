"""A pair from the options, and answers from the pair, with Ctrl-C as a request rather than an accident."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import typer

from paceline.cli.options import Pair
from paceline.cli.output import INTERRUPTED, loading_bar, note, say_error
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request, TokenDelta

if TYPE_CHECKING:
    from paceline.llm import LLM


def open_pair(pair: Pair) -> LLM:
    """Returns the loaded pair; says so on stderr when there is no drafter to be found."""
    with loading_bar() as report:
        from paceline.llm import LLM  # torch takes seconds to import: under the bar

        nodes: int | Literal["auto"] | None = "auto" if pair.tree_nodes is None else pair.tree_nodes or None
        llm = LLM(
            pair.target,
            None if pair.drafter == "none" else pair.drafter,
            device=pair.device,
            dtype=pair.dtype,
            backend=cast(Any, pair.backend),  # `LLM` refuses others
            block_size=pair.block_size,
            tree_nodes=nodes,
            lookup=pair.lookup,
            exact="auto" if pair.exact is None else pair.exact,
            offline=pair.offline,
            progress=report,
        )
    if pair.drafter == "auto" and llm.checkpoint is None:
        hint = "--drafter FOLDER names one, --drafter lookup needs none"
        note(f"no drafter ships for {pair.target}: decoding plainly; {hint}")
    return llm


def describe(llm: LLM, drafter: str) -> dict[str, object]:
    """Returns what a JSON document says of the pair.

    `drafter` is "shipped", null, or as the option has it; `lookup` whether copies are drafted.
    """
    from paceline.drafter.combined import Combined
    from paceline.drafter.lookup import PromptLookup

    used = None if llm.drafter is None else "shipped" if drafter == "auto" else drafter
    who = llm.neural or llm.drafter
    chain = llm.block_size or (who.block_size if who else 1)
    return {
        "target": llm.target.spec.name,
        "backend": llm.backend,
        "drafter": used,
        "lookup": isinstance(llm.drafter, Combined | PromptLookup),
        "block_size": chain,
        "tree_nodes": llm.tree_nodes if llm.paced is None else "auto",
        "exact": llm.exact,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
    }


class Interrupt:
    """Ctrl-C as a request: the first is noted and obeyed between steps, the second raises `KeyboardInterrupt`.

    A job that a shell started to ignore Ctrl-C goes on ignoring it.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Self:
        if self._previous is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def ignore(delta: TokenDelta) -> None:
    """Shows nothing."""


def complete(
    llm: LLM,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    plain: bool = False,
    show: Callable[[TokenDelta], None] = ignore,
) -> Completion:
    """Returns one answer, `show`n block by block; after Ctrl-C what there is of it, "cancelled".

    Args:
        plain: leave the drafter out.
    """
    [completion] = complete_all(llm, prompt_ids, params, plain=plain, show=show)
    return completion


def complete_all(
    llm: LLM,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    plain: bool = False,
    show: Callable[[TokenDelta], None] = ignore,
) -> list[Completion]:
    """Returns all `params.n` answers; otherwise like `complete`."""
    engine = llm.new_engine(plain=plain)
    ids = engine.add(Request("request-0", tuple(prompt_ids), params))
    try:
        with Interrupt() as interrupt:
            while engine.has_work and not interrupt.requested:
                for delta in engine.step():
                    show(delta)
    finally:
        engine.close()
    return [engine.take_completion(name) for name in ids]


def leave_unless_finished(*completions: Completion) -> None:
    """Ends the program with exit code 1 where a text led into an error, with 130 where Ctrl-C ended one."""
    for completion in completions:
        if completion.finish_reason == "error":
            say_error(str(completion.stop_reason))
            raise typer.Exit(1)
    if any(completion.finish_reason == "cancelled" for completion in completions):
        say_error("interrupted")
        raise typer.Exit(INTERRUPTED)
