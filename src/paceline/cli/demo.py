"""`paceline demo`: DFlash beside plain decoding, on ten prompts of different kinds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli import options
from paceline.cli.decoding import complete, describe, ignore, leave_unless_finished, open_pair
from paceline.cli.input import read_text
from paceline.cli.output import Transcript, is_terminal, note, say_error, summary, write_json
from paceline.cli.sampling import named_as_options
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Completion

if TYPE_CHECKING:
    from paceline.llm import LLM

app = typer.Typer()

_KEYS = {"id", "kind", "prompt"}
_WARM_UP = SamplingParams(max_new_tokens=8)


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt of the demo.

    Args:
        id: its name.
        kind: what it stands for, such as "maths".
        prompt: one user message.
    """

    id: str
    kind: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt, answered both ways."""

    prompt: DemoPrompt
    plain: Completion
    dflash: Completion

    @property
    def identical(self) -> bool:
        """Whether both ways gave the same tokens."""
        return self.plain.token_ids == self.dflash.token_ids

    @property
    def speedup(self) -> float | None:
        """Speed of DFlash over that of plain decoding, after the first token; `None` where there is only one."""
        plain, dflash = self.plain.tokens_per_s, self.dflash.tokens_per_s
        return dflash / plain if plain and dflash else None

    def to_dict(self) -> dict[str, object]:
        """Returns the row's JSON shape."""
        return {
            "kind": self.prompt.kind,
            "id": self.prompt.id,
            "num_tokens": len(self.dflash.token_ids),
            "identical": self.identical,
            "acceptance_length": self.dflash.acceptance_length,
            "plain_tokens_per_s": self.plain.tokens_per_s,
            "dflash_tokens_per_s": self.dflash.tokens_per_s,
            "speedup": self.speedup,
        }


@dataclass(frozen=True, slots=True)
class Totals:
    """All rows together."""

    identical: bool
    acceptance_length: float | None
    plain_tokens_per_s: float | None
    dflash_tokens_per_s: float | None
    speedup: float | None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Totals:
        """Returns pooled τ, and speeds from seconds and tokens summed over rows, first tokens left out."""
        from paceline.core.acceptance import acceptance_length

        plain, dflash = _speed([row.plain for row in rows]), _speed([row.dflash for row in rows])
        return cls(
            identical=all(row.identical for row in rows),
            acceptance_length=acceptance_length([step for row in rows for step in row.dflash.steps]),
            plain_tokens_per_s=plain,
            dflash_tokens_per_s=dflash,
            speedup=dflash / plain if plain and dflash else None,
        )


def _speed(completions: Sequence[Completion]) -> float | None:
    num_tokens = sum(len(c.token_ids) - 1 for c in completions)
    seconds = sum(c.decode_s for c in completions)
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None


@options.command(app)
def demo(
    pair: options.Pair,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Other prompts: JSON lines with id, kind and prompt.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 96,
    as_json: options.AsJson = False,
) -> None:
    """Show DFlash beside plain decoding on ten prompts.

    Greedy, one prompt at a time. On a terminal, green is what the drafter guessed and the target confirmed. Exit
    code 1 says that a text differed.
    """
    with named_as_options():
        params = SamplingParams(max_new_tokens=max_new_tokens)
    chosen = load_demo_prompts(prompts)
    _require_drafter(pair)
    llm = open_pair(pair)
    rows = run(llm, chosen, params, live=is_terminal() and not as_json)
    totals, used = Totals.of(rows), describe(llm, pair.drafter)
    if as_json:
        write_json(_document(rows, totals, used))
    else:
        _print_table(rows, totals, used)
    if not totals.identical:
        differing = ", ".join(row.prompt.id for row in rows if not row.identical)
        say_error(f"plain decoding and DFlash gave different texts for {differing}")
        raise typer.Exit(1)


def load_demo_prompts(path: Path | None) -> list[DemoPrompt]:
    """Returns the prompts of a JSON-lines file, or those that ship.

    Raises:
        ConfigError: a line without exactly the text fields id, kind and prompt, or no lines at all.
        OSError: a file that cannot be read.
    """
    source = path or Path(str(resources.files("paceline"))) / "data" / "demo_prompts.jsonl"
    lines = read_text(source).split("\n")
    found = [_prompt(line, f"{source}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{source}: expected at least one prompt, got none")
    return found


def _prompt(line: str, where: str) -> DemoPrompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict) or set(row) != _KEYS or not all(isinstance(v, str) for v in row.values()):
        raise ConfigError(
            f"{where}: expected an object with exactly the texts id, kind and prompt, got {line:.80}"
        )
    return DemoPrompt(**row)


def _require_drafter(pair: options.Pair) -> None:
    if pair.drafter == "none":
        raise typer.BadParameter(
            "the demo compares with a drafter; name a folder, or auto", param_hint="--drafter"
        )
    from paceline.llm import shipped_drafter

    if pair.drafter == "auto" and shipped_drafter(pair.target) is None:
        raise ConfigError(
            f"drafter: none ships for target {pair.target!r}; hint: name one with --drafter FOLDER, or train one with "
            "`paceline train`"
        )


def run(llm: LLM, prompts: Sequence[DemoPrompt], params: SamplingParams, *, live: bool) -> list[Row]:
    """Returns a row for each prompt; which way goes first alternates, after one warm-up of each.

    Args:
        live: show the DFlash texts as they arrive.
    """
    warm_up = llm.render(prompts[0].prompt)
    for plain in (True, False):
        leave_unless_finished(complete(llm, warm_up, _WARM_UP, plain=plain))
    rows = []
    for number, prompt in enumerate(prompts):
        title = f"{number + 1}/{len(prompts)} {prompt.kind}"
        if live:
            _print_title(title, prompt.prompt)
        rows.append(_compare(llm, prompt, params, plain_first=number % 2 == 0, live=live))
        if not live:
            verdict = "identical" if rows[-1].identical else "DIFFERENT"
            note(f"{title}: {verdict}, {summary(rows[-1].dflash)}")
    return rows


def _compare(llm: LLM, prompt: DemoPrompt, params: SamplingParams, *, plain_first: bool, live: bool) -> Row:
    ids = llm.render(prompt.prompt)
    done: dict[bool, Completion] = {}
    for plain in (plain_first, not plain_first):
        transcript = Transcript(llm.codec)
        show = transcript.show if live and not plain else ignore
        done[plain] = complete(llm, ids, params, plain=plain, show=show)
        if live and not plain:
            transcript.finish(done[plain].text)
        if live:
            note(f"{'plain ' if plain else 'DFlash'}  {summary(done[plain])}")
        leave_unless_finished(done[plain])
    return Row(prompt, done[True], done[False])


def _print_title(title: str, prompt: str) -> None:
    line = Text.assemble("\n", (title, "bold"), "  ", (" ".join(prompt.split()), "dim"))
    Console(highlight=False).print(line, no_wrap=True, overflow="ellipsis")


def _document(rows: Sequence[Row], totals: Totals, pair: dict[str, object]) -> dict[str, Any]:
    from paceline.engine.runtime import machine

    return {
        "identical": totals.identical,
        "acceptance_length": totals.acceptance_length,
        "speedup": totals.speedup,
        "rows": [row.to_dict() for row in rows],
        "pair": pair,
        "environment": machine(),
    }


def _print_table(rows: Sequence[Row], totals: Totals, pair: dict[str, object]) -> None:
    drafts = (
        f"trees of {pair['tree_nodes']}" if pair["tree_nodes"] else f"chains, block size {pair['block_size']}"
    )
    if pair["tree_nodes"] == "auto":
        drafts = "drafts as large as pays"
    if pair["lookup"]:
        drafts += ", beside lookup"
    table = Table(caption=f"{pair['target']}, {pair['dtype']} on {pair['device']}, {drafts}")
    table.add_column("kind")
    for name in ("tokens", "identical", "τ", "plain tok/s", "DFlash tok/s", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (row.dflash.acceptance_length, row.plain.tokens_per_s, row.dflash.tokens_per_s, row.speedup)
        table.add_row(
            Text(row.prompt.kind), str(len(row.dflash.token_ids)), _yes(row.identical), *_numbers(*cells)
        )
    table.add_section()
    num_tokens = sum(len(row.dflash.token_ids) for row in rows)
    cells = (totals.acceptance_length, totals.plain_tokens_per_s, totals.dflash_tokens_per_s, totals.speedup)
    table.add_row("all", str(num_tokens), _yes(totals.identical), *_numbers(*cells), style="bold")
    Console(highlight=False).print(table)


def _yes(identical: bool) -> str:
    return "yes" if identical else "[bold red]NO[/]"


def _numbers(
    tau: float | None, plain: float | None, dflash: float | None, speedup: float | None
) -> list[str]:
    shapes = ((tau, "{:.2f}"), (plain, "{:.1f}"), (dflash, "{:.1f}"), (speedup, "{:.2f}×"))
    return ["–" if value is None else shape.format(value) for value, shape in shapes]
