"""The report of a run: what stands in it, that it is whole and safe wherever it is opened, and its command."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import struct
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from paceline.bench.arms.base import Load
from paceline.bench.numbers.summary import Cell, Interval, Summary
from paceline.bench.pages import amounts, page, sections
from paceline.bench.pages.figures import figures
from paceline.bench.pages.looks import COLOURS, styles
from paceline.bench.pages.page import document, to_csv, write_report
from paceline.bench.pages.panels import FOREST, Figure, forest
from paceline.bench.pages.plots import to_plotly, to_png
from paceline.bench.runs.plan import Plan, Rules
from paceline.bench.runs.rows import Run
from paceline.cli.report import judge
from synthetic_runs import Scenario, make_run

SCRIPT = "</script><img src=x onerror=alert(1)>"
TEMPLATE = "{{7*7}} $\\frac{$ %{x}"
VOID = {"meta", "img", "br", "link", "input"}


def with_rules(run: Run, **rules: object) -> Run:
    return dataclasses.replace(run, plan={**run.plan, "rules": {**dataclasses.asdict(Rules()), **rules}})


def rich_run() -> Run:
    """Returns a run that has something of everything."""
    scenario = Scenario(
        ratios={
            "plain": 1.0,
            "dflash": lambda kind, load: 1.8 / (1 + 0.08 * (load.concurrency or 0)),
            "lookup": 1.1,
        },
        loads=(Load(1), Load(16)),
        accepted={"dflash": 0.7, "lookup": 0.3},
        failures={"lookup": 0.05},
        num_blocks=4,
    )
    run = with_rules(make_run(scenario), latency={"ttft_s": 0.4, "attainment": 0.9}, price_per_hour=2.5)
    return dataclasses.replace(
        run,
        workload={**run.workload, "notes": ["3 addresses were masked"]},
        lost=("lookup: died in block 3",),
        is_complete=False,
    )


@dataclass
class Parsed(HTMLParser):
    """A page: its elements with attributes, visible text, and contents of scripts; refuses tags that do not match."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    text: str = ""
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


def parse(html: str) -> Parsed:
    parsed = Parsed()
    parsed.feed(html)
    parsed.close()
    assert not parsed.open
    return parsed


@dataclass(frozen=True)
class Written:
    """A report on disk, and what it is made of."""

    run: Run
    summary: Summary
    paths: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        return self.paths[0].parent

    def parsed(self) -> Parsed:
        return parse(self.paths[0].read_text(encoding="utf-8"))


def written(run: Run, folder: Path) -> Written:
    summary = judge(run, {})
    return Written(run, summary, write_report(run, summary, folder))


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return written(rich_run(), tmp_path_factory.mktemp("rich") / "new")


@pytest.fixture(scope="module")
def rich_page(rich: Written) -> Parsed:
    return rich.parsed()


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    scenario = Scenario(
        ratios={"plain": 1.0, SCRIPT: 1.5, TEMPLATE: 1.2},
        kinds=(f"kind {SCRIPT}", "{% raw %}"),
        accepted={SCRIPT: 0.7},
        failures={TEMPLATE: 0.3},
        num_blocks=3,
    )
    run = make_run(scenario)
    rows = tuple(
        dataclasses.replace(row, outcome=dataclasses.replace(row.outcome, failure=f"500 {SCRIPT}"))
        if row.outcome.failure
        else row
        for row in run.rows
    )
    run = dataclasses.replace(
        run,
        rows=rows,
        command=f"paceline bench --log '{SCRIPT}'",
        workload={**run.workload, "name": SCRIPT, "notes": [SCRIPT, TEMPLATE]},
        environment={"machine": SCRIPT},
        lost=(SCRIPT,),
    )
    return written(run, tmp_path_factory.mktemp("hostile")).parsed()


# What stands in it ---------------------------------------------------------------------------------------------------


def test_verdict_arms_kinds_loads_and_notes_are_said(rich: Written, rich_page: Parsed) -> None:
    head = rich_page.text.index(rich.summary.decisions[0].sentence)
    assert head < rich_page.text.index("What was measured")
    expected = [*rich.run.arms, "code", "chat", "1 at once", "16 at once", "3 addresses were masked"]
    expected += [
        "lookup: died in block 3",
        "Not everything that was planned",
        "connection reset",
        "TTFT within 400 ms",
    ]
    expected += [decision.sentence for decision in rich.summary.decisions]
    expected += [reason for decision in rich.summary.decisions for reason in decision.reasons]
    expected += ["its ratio falls through 1 at", "plain against itself is"]
    missing = [text for text in expected if text not in rich_page.text]
    assert not missing


def test_every_ratio_is_in_the_tables(rich: Written, rich_page: Parsed) -> None:
    ratios = [amounts.span(cell.ratio, decimals=2) for cell in rich.summary.cells if cell.ratio]
    assert len(ratios) == 2 * 2 * 3
    assert all(ratio in rich_page.text for ratio in ratios)


def test_numbers_that_are_none_are_never_shown_as_such(rich: Written, rich_page: Parsed) -> None:
    assert any(math.isinf(cell.e2e_s.p99.high) for cell in rich.summary.cells if cell.e2e_s)
    assert ", —]" in rich_page.text
    texts = [rich_page.text, (rich.folder / "rows.csv").read_text(), json.dumps(rich_page.data["figures"])]
    texts += [str(image["alt"]) for image in rich_page.all("img")]
    for text in texts:
        assert not re.search(r"\b(None|nan|NaN|inf|Infinity)\b", text)


def test_a_run_without_a_single_answer_has_a_report(tmp_path: Path) -> None:
    run = make_run(Scenario(failures={"plain": 1.0, "dflash": 1.0, "plain again": 1.0}, num_blocks=2))
    report = written(run, tmp_path)
    parsed = report.parsed()
    assert {path.name for path in report.paths} == {"report.html", "report.json", "rows.csv"}
    assert "connection reset" in parsed.text and "Figures" not in parsed.text
    assert not re.search(r"\b(None|nan|inf)\b", parsed.text)


def test_a_run_without_a_single_row_has_a_report(tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(Scenario(num_blocks=1)), rows=(), passes=())
    parsed = written(run, tmp_path).parsed()
    assert "The baseline was not run a second time" in parsed.text


def test_the_control_is_put_in_words() -> None:
    cells = [
        Cell("plain again", Load(1), 0.0, None, 8, 0, ratio=Interval(1.0, 0.98, 1.02)),
        Cell("plain again", Load(4), 0.0, None, 8, 0, ratio=Interval(1.05, 1.02, 1.08)),
        Cell("plain again", Load(8), 0.0, None, 8, 8),
    ]
    fine, shifted, absent = sections.control_sentences(Summary("plain", (), control=tuple(cells)), Rules())
    assert "The interval holds 1" in fine
    assert "does not hold 1" in shifted and "5 % of cases" in shifted
    assert "no control" in absent


def test_fingerprints_say_what_differs(rich: Written) -> None:
    rows = {row[0]: row[1:] for row in sections.fingerprints(rich.run).rows}
    assert rows["dtype"] == ("basis", "same", *["float32"] * 4)
    assert rows["drafter"] == ("speculation", "differs", "—", "dflash", "lookup", "—")


def test_checks_of_verify_are_shown(rich: Written) -> None:
    check = {"name": "ties", "status": "flagged", "summary": "3 of 100", "bound": 0.03}
    table = sections.exactness({"dflash": {"checks": [check]}})
    assert table.rows == (("dflash", "ties", "flagged", "3 of 100", "0.03"),)


# Whole and safe ------------------------------------------------------------------------------------------------------


def test_headings_tables_and_images_are_accessible(rich_page: Parsed) -> None:
    assert rich_page.all("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in rich_page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(cell.get("scope") in ("col", "row") for cell in rich_page.all("th"))
    assert all("dflash" in str(image["alt"]) or "A/A" in str(image["alt"]) for image in rich_page.all("img"))
    assert all(box.get("aria-label") for box in rich_page.all("div") if box.get("role"))
    ids = [attributes["id"] for _, attributes in rich_page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {a["aria-labelledby"] for _, a in rich_page.elements if "aria-labelledby" in a}
    assert labels <= set(ids)


def test_nothing_is_fetched(rich_page: Parsed) -> None:
    links = [
        str(value)
        for _, attributes in rich_page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "action", "poster")
    ]
    assert links and all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    ours = "".join(page._data(name) for name in ("report.css", "report.js", "report.html.j2"))
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(|WebSocket", ours)


def test_only_our_scripts_may_run(rich_page: Parsed, hostile_page: Parsed) -> None:
    for parsed in (rich_page, hostile_page):
        policy = next(str(m["content"]) for m in parsed.all("meta") if m.get("http-equiv"))
        assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
        assert len(parsed.scripts) == 3
        for script in parsed.scripts[1:]:
            digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy


def test_hostile_words_are_only_words(hostile_page: Parsed) -> None:
    for text in (SCRIPT, TEMPLATE, "{% raw %}", f"500 {SCRIPT}"):
        assert text in hostile_page.text
    assert not any(name.startswith("on") for _, attributes in hostile_page.elements for name in attributes)
    assert all(str(image["src"]).startswith("data:") for image in hostile_page.all("img"))
    assert hostile_page.data["report"]["workload"]["name"] == SCRIPT
    drawn = json.dumps(hostile_page.data["figures"])
    assert "&lt;/script&gt;&lt;img" in drawn and "<" not in drawn.replace("<extra></extra>", "")


# Figures -------------------------------------------------------------------------------------------------------------


def names_of(run: Run) -> set[str]:
    rules = Plan.from_dict(run.plan).rules
    return {figure.name for figure in figures(judge(run, {}), rules)}


def test_there_is_a_figure_for_all_that_was_measured(rich: Written, rich_page: Parsed) -> None:
    everything = {"speed_by_kind", "speed_by_load", "frontier", "break_even", "good_share", "latency"}
    everything |= {"acceptance", "steps", "control"}
    assert {path.stem for path in rich.paths if path.suffix == ".png"} == everything
    assert set(rich_page.data["figures"]) == everything
    boxes = [box for box in rich_page.all("div") if box.get("class") == "plot"]
    assert len(boxes) == sum(len(panels) for panels in rich_page.data["figures"].values())


def test_there_is_no_figure_without_data() -> None:
    bare = Scenario(
        ratios={"plain": 1.0, "x": 1.2}, accepted={}, has_control=False, has_steps=False, num_blocks=2
    )
    assert names_of(make_run(bare)) == {"speed_by_kind", "frontier", "latency"}
    alone = Scenario(ratios={"plain": 1.0}, accepted={}, has_control=False, has_steps=False, num_blocks=2)
    assert "speed_by_kind" not in names_of(make_run(alone))


def test_plotly_knows_every_word_of_ours(rich_page: Parsed, hostile_page: Parsed) -> None:
    for parsed in (rich_page, hostile_page):
        text = json.dumps(parsed.data["figures"])
        for mark, colour in COLOURS.items():
            text = text.replace(mark, colour)
        assert "@" not in text
        for panels in json.loads(text).values():
            for panel in panels:
                go.Figure(panel)  # raises at an unknown or impossible property


def test_pngs_are_images(rich: Written) -> None:
    for path in rich.paths:
        if path.suffix == ".png":
            data = path.read_bytes()
            width, height = struct.unpack(">II", data[16:24])
            assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
            assert width > 700 and height > 150


def test_an_arm_looks_the_same_everywhere_and_unlike_others(rich: Written, rich_page: Parsed) -> None:
    looks = styles([f"arm {i}" for i in range(12)], "arm 0")
    assert len({(style.colour, style.symbol) for style in looks.values()}) == 12
    assert len({style.symbol for style in list(looks.values())[:8]}) == 8
    of_dflash = {
        trace["marker"]["color"]
        for panels in rich_page.data["figures"].values()
        for panel in panels
        for trace in panel["data"]
        if trace["name"] == "dflash"
    }
    assert of_dflash == {styles(list(rich.run.arms), "plain")["dflash"].colour}


def test_the_page_has_a_colour_for_every_mark() -> None:
    style = resources.files("paceline").joinpath("data", "report.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    for mark, colour in COLOURS.items():
        assert f"--{mark[1:]}: {colour};" in light
        assert re.search(rf"--{mark[1:]}: #[0-9a-f]{{6}};", dark)


def test_an_open_end_runs_off_the_panel() -> None:
    rows = {"all": {"a": Interval(1.2, 1.1, math.inf), "b": Interval(1.4, 1.3, 1.5)}}
    (panel,) = forest("title", "x", rows, ())
    assert panel.shape == FOREST and math.isfinite(panel.x.high)
    drawn = to_plotly(panel, styles(["a", "b"], "a"))["data"]
    ends = [trace["x"][0] + trace["error_x"]["array"][0] for trace in drawn]
    assert ends[0] > panel.x.high and ends[1] == pytest.approx(1.5) and ends[1] < panel.x.high
    assert drawn[0]["x"][0] - drawn[0]["error_x"]["arrayminus"][0] == pytest.approx(1.1)


def test_names_that_no_font_has_are_drawn_without_complaint() -> None:
    rows = {"日本語 $": {"名前 🙂": Interval(1.2, 1.1, 1.3)}}
    (panel,) = forest("a $ b $ c", "x", rows, ())
    assert to_png(Figure("x", "t", "c", (panel,)), styles(["名前 🙂"], "plain")).startswith(b"\x89PNG")


# Files ---------------------------------------------------------------------------------------------------------------


def test_csv_has_a_line_for_each_row(rich: Written) -> None:
    text = (rich.folder / "rows.csv").read_text(encoding="utf-8")
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == len(rich.run.rows)
    for line, row in zip(lines, rich.run.rows, strict=True):
        assert (line["arm"], line["id"], line["kind"]) == (row.place.arm, row.outcome.id, row.kind)
        assert line["e2e_s"] == ("" if row.outcome.e2e_s is None else repr(row.outcome.e2e_s))
        assert line["failure"] == (row.outcome.failure or "")
    one = next(r for r in rich.run.rows if r.outcome.acceptance)
    line = next(csv.DictReader(io.StringIO(to_csv((one,)))))
    steps = one.outcome.acceptance or ()
    assert line["num_steps"] == str(sum(n for *_, n in steps))
    assert line["num_accepted"] == str(sum(a * n for _, a, n in steps))


def test_json_holds_the_report_and_the_page_holds_both(rich: Written, rich_page: Parsed) -> None:
    stored = json.loads((rich.folder / "report.json").read_text(encoding="utf-8"))
    assert stored == document(rich.run, rich.summary) == rich_page.data["report"]
    assert stored["schema_version"] == 1
    assert stored["verdict"] == rich.summary.decisions[0].sentence
    assert stored["summary"]["cells"][0]["e2e_s"]["p99"]["high"] is None  # was infinite
    assert stored["summary"]["cells"][1]["arm"] == rich.summary.cells[1].arm
    assert {*stored} > {"plan", "workload", "environment", "command", "arms", "lost"}
    assert rich_page.data["rows"] == (rich.folder / "rows.csv").read_text(encoding="utf-8")


def test_a_disk_that_fills_up_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    run = dataclasses.replace(make_run(Scenario(num_blocks=1)), rows=(), passes=())
    with pytest.raises(OSError, match="No space"):
        written(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "old"
