"""The curve of a run as a picture and as a page that stands alone."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.train.curves import write_csv, write_pictures
from paceline.train.trainer import CurveRow

RECIPE = {"target": "a <model> & more", "train": {"lr": 1e-3}}


def rows(count: int) -> list[CurveRow]:
    return [
        CurveRow(
            step=10 * i,
            num_blocks=320 * i,
            seconds=4.0 * i,
            train_loss=3.0 - 0.1 * i,
            held_out_loss=3.1 - 0.1 * i,
            acceptance_length=1.0 + 0.125 * i,
            slot_accuracy=(0.1 * i, 0.05 * i),
            lr=1e-3,
        )
        for i in range(count)
    ]


def test_the_page_stands_alone_and_says_what_was_measured(tmp_path: Path) -> None:
    curve = rows(4)
    assert write_pictures(curve, curve[2], RECIPE, tmp_path)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.html", "curve.png"]
    page = (tmp_path / "curve.html").read_text(encoding="utf-8")
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"https?:|<script|<link|\bsrc=|@import|url\((?!#)", outside)
    assert "A drafter for a &lt;model&gt; &amp; more" in page
    assert "Step 30: τ 1.375. Best so far, and kept: step 20, τ 1.250." in page
    table = ElementTree.fromstring(page[page.index("<table>") : page.index("</table>") + len("</table>")])
    cells = [[cell.text or "" for cell in row] for row in table]
    assert cells[0] == [
        "step",
        "blocks",
        "minutes",
        "τ",
        "held-out loss",
        "training loss",
        "learning rate",
        "blocks/s",
    ]
    assert cells[3] == ["20", "640", "0.1", "1.250", "2.900", "2.800", "1.00e-03", "80.0"]
    drawing = page[page.index("<svg") : page.index("</svg>")]
    for words in (
        "learning rate",
        "blocks per second",
        "slot 2",
        "held out",
        "step of 32 blocks",
        "best: 1.250",
    ):
        assert words in drawing
    assert "&quot;lr&quot;: 0.001" in page


def test_one_row_is_enough(tmp_path: Path) -> None:
    assert write_pictures(rows(1), rows(1)[0], RECIPE, tmp_path)
    assert "Step 0: τ 1.000" in (tmp_path / "curve.html").read_text(encoding="utf-8")


def test_the_same_curve_is_the_same_page(tmp_path: Path) -> None:
    found = set()
    for _ in range(2):
        write_pictures(rows(3), rows(3)[0], RECIPE, tmp_path)
        found.add((tmp_path / "curve.html").read_text(encoding="utf-8"))
    assert len(found) == 1


def test_without_matplotlib_there_are_numbers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_csv(rows(3), tmp_path / "curve.csv")
    assert not write_pictures(rows(3), rows(3)[0], RECIPE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["curve.csv"]
    table = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    assert [float(row["accuracy_2"]) for row in table] == [0.0, 0.05, 0.1]
    assert table[2]["acceptance_length"] == "1.25"
