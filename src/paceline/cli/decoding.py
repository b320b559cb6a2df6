"""A pair from the options, and one answer from the pair, with Ctrl-C as a request rather than an accident."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import typer

from paceline.cli.output import INTERRUPTED, loading_bar, note, say_error
from paceline.core.types import Completion, Request, SamplingParams, TokenDelta

if TYPE_CHECKING:
    from paceline.llm import LLM


def open_pair(
    target: str,
    drafter: str,
    *,
    block_size: int | None = None,
    tree_nodes: int | None = None,
    **options: Any,
) -> LLM:
    """Returns the loaded pair; says so on stderr when there is no drafter to be found.

    Args:
        target, drafter, block_size, tree_nodes: as the options have them.
        options: device, dtype, backend, offline; see `LLM`.
    """
    with loading_bar() as report:
        from paceline.llm import LLM  # torch takes seconds to import: under the bar

        chosen = None if drafter == "none" else drafter
        nodes: int | Literal["auto"] | None = "auto" if tree_nodes is None else tree_nodes or None
        llm = LLM(target, chosen, block_size=block_size, tree_nodes=nodes, progress=report, **options)
    if drafter == "auto" and llm.checkpoint is None:
        note(f"no drafter ships for {target}: decoding plainly; --drafter FOLDER names one")
    return llm


def describe(llm: LLM, drafter: str) -> dict[str, object]:
    """Returns what a JSON document says of the pair: `drafter` is "shipped", a folder, or null."""
    used = None if llm.checkpoint is None else "shipped" if drafter == "auto" else drafter
    chain = llm.block_size or (llm.dflash.block_size if llm.dflash else 1)
    return {
        "target": llm.target.spec.name,
        "backend": llm.backend,
        "drafter": used,
        "block_size": chain,
        "tree_nodes": llm.tree_nodes,
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
    engine = llm.new_engine(plain=plain)
    request = Request("request-0", tuple(prompt_ids), params)
    engine.add(request)
    try:
        with Interrupt() as interrupt:
            while engine.has_work and not interrupt.requested:
                for delta in engine.step():
                    show(delta)
    finally:
        engine.close()
    return engine.take_completion(request.id)


def leave_if_cancelled(completion: Completion) -> None:
    """Ends the program with exit code 130 where Ctrl-C ended the answer."""
    if completion.finish_reason == "cancelled":
        say_error("interrupted")
        raise typer.Exit(INTERRUPTED)
