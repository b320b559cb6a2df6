"""What `benchmarks/speed.py` makes of its samples: ratios, merged pieces, tables, targets; its clock and its turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import speed
import speed_tables
from paceline.bench.arms.base import ArmError
from paceline.bench.arms.oracles import Trace
from paceline.bench.numbers.summary import Interval
from paceline.core.params import SamplingParams
from paceline.core.types import Proposal
from paceline.engine.engine import Engine
from paceline.testing import tiny_drafter, tiny_target
from speed_engines import Ours, Worker, llama_times, of_trace, run_in_turns
from speed_pairs import BATCHES, KINDS, chosen_cells, whole_batches
from speed_passes import floor_share, last_path
from speed_results import MixedPartError, merged, store, stored, without_folders
from speed_tables import DOCUMENT, FIGURE, page, pooled_row, verdict, written
from speed_timing import Timed, decode, prompts_of, rate_ratio, time_ratio, tokens_a_pass, turn, whole_ratio

PLAIN = [[100, 2.0, 101, 2.5, 0, 0], [50, 1.0, 51, 1.5, 0, 0]]
TWICE = [[100, 1.0, 101, 1.5, 40, 60], [50, 0.5, 51, 1.0, 20, 30]]


# Numbers -------------------------------------------------------------------------------------------------------------


def numbers(interval: Interval | None) -> tuple[float, ...]:
    """Estimate, low, high."""
    assert interval is not None
    return interval.estimate, interval.low, interval.high


def test_ratios_are_pooled_and_sure_where_every_sample_agrees() -> None:
    assert numbers(rate_ratio(TWICE, PLAIN)) == pytest.approx((2.0, 2.0, 2.0)), "the first token is left out"
    estimate, low, high = numbers(whole_ratio(TWICE, PLAIN))
    assert low < estimate < high and estimate == pytest.approx(4.0 / 2.5)
    assert numbers(tokens_a_pass(TWICE)) == pytest.approx((2.5, 2.5, 2.5))
    assert numbers(time_ratio([3.0, 1.0], [1.0, 1.0]))[0] == pytest.approx(2.0)


def test_samples_are_drawn_in_pairs() -> None:
    """Prompts differ tenfold and the arms by little: unpaired draws would say nothing."""
    plain = [[10, seconds, 10, seconds, 0, 0] for seconds in (1.0, 10.0, 2.0, 7.0)]
    faster = [
        [10, seconds * share, 10, seconds, 0, 0]
        for (_, seconds, *_), share in zip(plain, (0.8, 0.79, 0.81, 0.8), strict=True)
    ]
    found = rate_ratio(faster, plain)
    assert found is not None and 1.2 < found.low < found.high < 1.3


def test_what_says_nothing_is_none() -> None:
    nothing = [[0, 0.0, 1, 0.1, 0, 0]]
    assert rate_ratio(nothing, PLAIN[:1]) is None
    assert tokens_a_pass(PLAIN) is None and tokens_a_pass([[8, 1.0, 9, 1.0, 8, 0]]) is not None
    alone = rate_ratio(TWICE[:1], PLAIN[:1])
    assert alone is not None and speed_tables.span(alone) == "2.00 (?)", "one sample has no interval"


def test_the_floor_is_the_weights_over_the_rate() -> None:
    samples, rates = [[10, 1.0, 11, 1.0, 0, 0], [10, 2.0, 11, 2.0, 0, 0]], [2e9, 1e9]
    share = floor_share(samples, rates, 100_000_000)
    assert numbers(share) == pytest.approx((0.5, 0.5, 0.5)), "0.05 s of 0.1, and 0.1 of 0.2"


def test_everyone_is_first_and_orders_turn_round() -> None:
    orders = ["".join(turn("abc", number)) for number in range(6)]
    assert orders == ["abc", "bca", "cab", "cba", "acb", "bac"]


# The clock -----------------------------------------------------------------------------------------------------------


def test_the_clock_counts_what_the_engine_says() -> None:
    target = tiny_target(0)
    engines = Engine(target), Engine(target, tiny_drafter(target, 4, seed=0))
    prompts, params = [(1, 2, 3), (4, 5)], [SamplingParams(12, ignore_eos=True)] * 2
    plain, drafted = (decode(engine, prompts, params) for engine in engines)
    assert plain.texts == drafted.texts and [len(text) for text in plain.texts] == [12, 12]
    assert plain.num_new_tokens == 24 and 0 < plain.num_tokens < 24 and 0 < plain.seconds < plain.whole_s
    assert plain.num_accepted == 0 and plain.num_steps == 22
    assert drafted.num_steps + drafted.num_accepted >= 22
    assert decode(engines[0], prompts, params).texts == plain.texts, "an engine serves prompt after prompt"


def test_an_oracle_is_timed_from_its_first_token() -> None:
    trace = Trace(ids=[1, 2, 3, 4, 5], times=[10.0, 11.0, 13.0], sizes=[1, 3, 1], drafted=[4, 4])
    timed = of_trace(lambda: trace, drafts=True)
    assert (timed.num_tokens, timed.seconds, timed.num_steps, timed.num_accepted) == (4, 3.0, 2, 2)
    assert of_trace(lambda: trace).num_steps == 0


def test_the_path_to_a_tree_s_last_node() -> None:
    assert last_path(Proposal((7, 8, 9, 6), (0, 0, 1, 2))) == (0, 2, 4)
    assert last_path(Proposal()) == (0,)


# Other engines -------------------------------------------------------------------------------------------------------

LOG = """
llama_perf_context_print: prompt eval time =     250.00 ms /    10 tokens (   25.00 ms per token,    40.00 tok/s)
llama_perf_context_print:        eval time =     500.00 ms /    63 runs   (    7.94 ms per token,   126.00 tok/s)
"""


def test_llama_s_times_are_its_own() -> None:
    assert llama_times(LOG) == Timed(63, 0.5, 64, 0.75)
    with pytest.raises(ArmError, match="times"):
        llama_times("error: no such model")


class Fixed:
    """An engine that answers at once, and breaks where it is told to."""

    def __init__(self, said: int, breaks_at: int | None = None) -> None:
        self.said, self.breaks_at, self.num_answers = said, breaks_at, 0

    def open(self) -> str:
        if self.breaks_at == -1:
            raise ArmError("not installed;\nhint: install it")
        return "fixed 1"

    def answer(self, prompt: tuple[int, ...], max_new_tokens: int) -> Timed:
        if self.num_answers == self.breaks_at:
            raise KeyError("lost")
        self.num_answers += 1
        return Timed(1, 0.5, 2, 1.0, texts=((*prompt, self.said),))

    def close(self) -> None:
        """Nothing to free."""


def test_what_cannot_run_says_why_and_leaves_no_sample() -> None:
    arms = {
        "plain": Fixed(1),
        "same": Fixed(1),
        "other": Fixed(2),
        "lacking": Fixed(1, -1),
        "breaking": Fixed(1, 2),
    }
    row = run_in_turns(arms, [(1,), (2,), (3,)], 8)
    assert set(row["samples"]) == set(row["versions"]) == {"plain", "same", "other"}
    assert row["absent"] == {
        "lacking": "before the first prompt: not installed; hint: install it",
        "breaking": "at prompt 1: KeyError: 'lost'",
    }
    assert row["num_same"] == {"same": 3, "other": 0} and row["num_texts"] == 3
    assert arms["plain"].num_answers == 4, "once to warm up"


def test_ours_may_not_fail() -> None:
    def broken() -> Engine:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run_in_turns({"plain": Ours(broken)}, [(1,)], 8)


def test_a_worker_gives_its_reason() -> None:
    settings = {"num_threads": 1, "options": {"gguf": "none.gguf"}, "max_positions": 8}
    worker = Worker("llama", Path(sys.executable), settings, 60.0)
    with pytest.raises(ArmError, match="llama_cpp"):
        worker.open()
    worker.close()
    with pytest.raises(ArmError, match="--llama-python"):
        Worker("llama", None, settings, 60.0).open()


# Parts and pieces ----------------------------------------------------------------------------------------------------


def part(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A part as it is stored."""
    environment = {
        "processor": "one",
        "cpu_capability": "AVX2",
        "num_threads": 1,
        "omp_wait_policy": "PASSIVE",
        "torch": "2",
    }
    found = {
        "command": "python speed.py",
        "date": "2020-01-02",
        "environment": environment,
        "settings": {"max_new_tokens": 8},
    }
    return {**found, "rows": rows, **changes}


def cell(kind: str, batch: int, dflash: list[list[float]]) -> dict[str, Any]:
    """A cell's row."""
    where = {"kind": kind, "batch": batch, "temperature": 0.0}
    return {**where, "num_texts": 2, "num_same": {"dflash": 2}, "samples": {"plain": PLAIN, "dflash": dflash}}


def test_pieces_are_merged_by_place_and_parts_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "results" / "speed.json"
    store(
        place,
        "rows",
        part([{"kind": "chain", "num_rows": 2, "seconds": [1.0], "plain_s": [1.0]}]),
        fresh=False,
    )
    store(place, "cells", part([cell("math", 1, PLAIN), cell("math", 2, PLAIN)]), fresh=False)
    store(place, "cells", part([cell("math", 2, TWICE), cell("code", 1, PLAIN)]), fresh=False)
    result = stored(place)
    assert list(result["parts"]) == ["rows", "cells"]
    cells = result["parts"]["cells"]["rows"]
    assert [(row["kind"], row["batch"]) for row in cells] == [("math", 1), ("math", 2), ("code", 1)]
    assert cells[1]["samples"]["dflash"] == TWICE, "the later one stands"
    store(place, "cells", part([cell("code", 1, PLAIN)]), fresh=True)
    assert len(stored(place)["parts"]["cells"]["rows"]) == 1
    assert sorted(path.name for path in place.parent.iterdir()) == ["speed.json"]


@pytest.mark.parametrize(
    "change", [{"environment": {"processor": "two"}}, {"settings": {"max_new_tokens": 9}}]
)
def test_pieces_that_were_not_measured_alike_are_refused(change: dict[str, Any]) -> None:
    result = {"parts": {"cells": part([cell("math", 1, PLAIN)])}}
    with pytest.raises(MixedPartError, match="--fresh"):
        merged(result, "cells", part([], **change), False)
    assert merged(result, "cells", part([], **change), True)["parts"]["cells"]["rows"] == []
    assert merged(result, "plain", part([], **change), False)["parts"]["cells"] == result["parts"]["cells"]


def test_folders_of_a_machine_are_not_stored() -> None:
    command = "python benchmarks/speed.py plain --data /a/b/data --gguf=/c/m.gguf"
    assert without_folders(command) == "python benchmarks/speed.py plain --data data --gguf=m.gguf"
    assert (
        without_folders("no '/x/y/python' in ../shared, see https://a.b/c")
        == "no 'python' in ../shared, see https://a.b/c"
    )


def test_cells_are_chosen_by_pattern() -> None:
    assert len(chosen_cells(())) == len(KINDS) * len(BATCHES) == 60
    assert chosen_cells(("math:8", "chat:1")) == [("math", 8), ("chat", 1)]
    assert chosen_cells(("bug fixes",)) == [("bug fixes", batch) for batch in BATCHES]
    assert {batch for _, batch in chosen_cells(("*:16",))} == {16} and len(chosen_cells(("*:16",))) == 12
    with pytest.raises(SystemExit, match="poetry"):
        chosen_cells(("poetry",))
    assert [whole_batches(count, 8) for count in (1, 8, 9)] == [8, 8, 16]


def test_prompts_are_spread_and_begin_again(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    rows = [{"id": str(i), "category": "a1" if i < 6 else "b", "turns": [str(i)]} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def render(messages: Any) -> list[int]:
        return [int(messages[-1]["content"])]

    assert prompts_of(file, 3, render, "a") == [(0,), (2,), (4,)]
    assert prompts_of(file, 3, render, "b") == [(6,), (7,), (6,)]
    with pytest.raises(SystemExit, match="'c'"):
        prompts_of(file, 1, render, "c")


# Tables --------------------------------------------------------------------------------------------------------------

SLOWER = [[100, 2.2, 101, 2.7, 100, 0], [50, 1.1, 51, 1.6, 50, 0]]


def test_a_cell_that_misses_its_target_is_shown() -> None:
    text = speed_tables.cells_part([cell("math", 1, TWICE), cell("math", 16, SLOWER), cell("code", 1, TWICE)])
    assert "| math | 2.00 (2.00–2.00) | **0.91 (0.91–0.91)** |" in text
    assert "| code | 2.00 (2.00–2.00) |  |" in text
    assert "**Missed** in 1 of 3: math × 16; the whole interval is above it in 2." in text
    found = {("math", 1): Interval(1.1, 0.9, 1.3), ("code", 1): None}
    assert verdict(found) == (
        "Target: no cell below 0.97. Met in all measured cells; the whole interval is above it in 0; 1 say nothing."
    )


def test_sets_are_pooled_with_all_their_samples() -> None:
    rows = [{"set": name, **cell("", 1, dflash)} for name, dflash in (("one", TWICE), ("two", SLOWER))]
    assert pooled_row(rows)["num_texts"] == 4 and pooled_row(rows)["samples"]["dflash"] == TWICE + SLOWER
    lines = speed_tables.pairs_part(rows).splitlines()
    assert lines[2].startswith("| one | 0 | 1 | 2 of 2 | 2.50 (2.50–2.50) | 2.00 ")
    assert lines[-1].startswith("| **all** | 0 | 1 | 4 of 4 |") and "| 1.25 (" in lines[-1], "6 s over 4.8"


def engines_row() -> dict[str, Any]:
    """A row of part `engines`."""
    samples = {"plain": PLAIN, "dflash": TWICE, "transformers": SLOWER, "transformers dflash": PLAIN}
    return {
        "num_texts": 2,
        "versions": dict.fromkeys(samples, "1"),
        "absent": {"vllm": "not opened: no such program"},
        "num_same": {"dflash": 2, "transformers": 1, "transformers dflash": 1},
        "samples": samples,
    }


def test_engines_stand_beside_ours_and_the_missing_with_their_reason() -> None:
    text = speed_tables.engines_part([engines_row()])
    assert "| transformers | 1 | 1 of 2 |  |  | 2.20 (2.20–2.20) | 45.5 |" in text
    assert "| transformers dflash | 1 | 1 of 2 | ? | 1.10 (1.10–1.10) | 2.00 (2.00–2.00) | 50.0 |" in text
    assert text.endswith("- vllm: not opened: no such program")


def growth_row(axis: str, value: int) -> dict[str, Any]:
    """A row of part `growth`."""
    held = {"target": 4_000_000, "drafter": 400_000}
    return {"axis": axis, "value": value, "bytes_per_sequence": held, **cell("", 1, TWICE)}


def test_growth_is_ordered_and_drawn_the_same_each_time() -> None:
    rows = [growth_row("batch", 8), growth_row("context", 1024), growth_row("context", 256)]
    lines = speed_tables.growth_part(rows).splitlines()[2:5]
    assert [line.split("|")[1:3] for line in lines] == [
        [" context ", " 256 "],
        [" context ", " 1,024 "],
        [" batch ", " 8 "],
    ]
    assert all("4.0 + 0.4 MB" in line for line in lines)
    drawing = speed_tables.figure(rows)
    assert drawing == speed_tables.figure(rows) and "tokens of context" not in drawing.split("<svg")[0]


def test_the_page_has_every_part() -> None:
    plain = {
        "weight_bytes": 100_000_000,
        "bytes_per_s": {"copy": [4e9, 4e9], "read": [8e9, 8e9]},
        "versions": {"transformers": "transformers 5"},
        "num_texts": 2,
        "num_same": {"transformers": 2},
        "samples": {"plain": PLAIN, "transformers": SLOWER},
    }
    wide = {"num_rows": 8, "plain_s": [1.0, 1.0]}
    rows = {
        "plain": [plain],
        "rows": [
            {"kind": "chain", "seconds": [1.5, 1.5], **wide},
            {"kind": "tree", "seconds": [2.5, 2.5], **wide},
        ],
        "pairs": [{"set": "one", **cell("", 1, TWICE)}],
        "engines": [engines_row()],
        "cells": [cell("math", 1, TWICE)],
        "growth": [growth_row("context", 256)],
    }
    text = page({"parts": {name: part(found) for name, found in rows.items()}})
    assert "share of the floor by copy, 4.0 GB/s | 1.25 (1.25–1.25)" in text
    assert "share of the floor by read, 8.0 GB/s | 0.62 " in text or "| 0.63 " in text
    assert "| 8 | 1.50 (1.50–1.50) | 2.50 (2.50–2.50) |" in text
    assert text.count("Measured 2020-01-02 by `python speed.py` (max_new_tokens 8) on processor one") == 6
    for name in rows:
        lacking = page({"parts": {other: part(found) for other, found in rows.items() if other != name}})
        assert f"Not measured yet: `python benchmarks/speed.py {name}`." in lacking


def test_the_document_shows_the_stored_result() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert written(document, stored()) == document, "hint: python benchmarks/speed.py write"
    assert ("growth" in stored()["parts"]) <= FIGURE.exists()
    with pytest.raises(ValueError, match="block"):
        written("no place", {"parts": {}})


def test_every_part_has_its_command() -> None:
    assert set(speed.RUNS) == set(speed_tables.SECTIONS)
    for name in speed.RUNS:
        arguments = speed.parser().parse_args([name, "--num-prompts", "3", "--max-new-tokens", "5"])
        assert (arguments.part, arguments.num_prompts, arguments.max_new_tokens) == (name, 3, 5)
