"""Who learns and who judges: sides that share nothing and that no other row moves, and general prompts beside them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.target.pull import pull
from paceline.target.text import TextCodec
from paceline.train.adaptation.split import Traffic, mix
from paceline.train.data.prompts import Prompt
from tiny_gguf import write_gguf

ROWS: list[dict[str, Any]] = [
    {"id": str(i), "category": "ab"[i % 2], "prompt": f"ink {i}"} for i in range(60)
]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    base = tmp_path_factory.mktemp("target")
    return TextCodec.load(pull(str(write_gguf(base / "tiny.gguf")), cache_dir=Path(base / "cache")))


def read(codec: TextCodec, rows: list[dict[str, Any]], max_tokens: int = 64, seed: int = 0) -> Traffic:
    return Traffic.read(rows, codec, max_tokens=max_tokens, seed=seed)


def ids(prompts: list[Prompt]) -> set[str]:
    return {prompt.id for prompt in prompts}


def test_sides_share_nothing_and_stay_when_rows_come_and_go(codec: TextCodec) -> None:
    learnt, held_out = map(ids, read(codec, ROWS).split(0.3))
    assert learnt | held_out == {row["id"] for row in ROWS}
    assert not learnt & held_out
    assert 8 <= len(held_out) <= 30
    shuffled = [*ROWS[:40], *({"id": f"new {i}", "prompt": f"king {i}"} for i in range(30))]
    random.Random(0).shuffle(shuffled)
    later, kept = map(ids, read(codec, shuffled).split(0.3))
    known = ids(list(read(codec, ROWS[:40]).prompts))
    assert (later & known, kept & known) == (learnt & known, held_out & known)
    assert ids(read(codec, ROWS, seed=1).split(0.3)[1]) != held_out


def test_a_smaller_share_holds_out_some_of_the_same(codec: TextCodec) -> None:
    traffic = read(codec, ROWS)
    assert ids(traffic.split(0.2)[1]) < ids(traffic.split(0.5)[1])


def test_what_begins_alike_stays_together(codec: TextCodec) -> None:
    rows: list[dict[str, Any]] = []
    for i in range(40):
        first = {"role": "user", "content": f"ink {i}"}
        rows += [
            {"id": f"{i}/plain", "prompt": f"ink {i}"},
            {"id": f"{i}/again", "turns": [f"ink {i}"]},
            {"id": f"{i}/loud", "prompt": f"  INK, {i}!"},
            {"id": f"{i}/system", "messages": [{"role": "system", "content": "sing"}, first]},
            {
                "id": f"{i}/later",
                "messages": [first, {"role": "assistant", "content": "4"}, {"role": "user", "content": "in"}],
            },
        ]
    traffic = read(codec, rows)
    assert traffic.num_repeated == 40  # "plain" and "again" are the same
    learnt, held_out = traffic.split(0.3)
    conversations = [{name.partition("/")[0] for name in ids(side)} for side in (learnt, held_out)]
    assert not conversations[0] & conversations[1]
    assert len(learnt) + len(held_out) == 160


def test_token_ids_are_told_by_their_text(codec: TextCodec) -> None:
    rows = [{"id": str(i), "prompt_ids": codec.encode(f"ink {i}")} for i in range(60)]
    by_text = [{"id": str(i), "prompt": f"ink {i}"} for i in range(60)]
    assert ids(read(codec, rows).split(0.3)[1]) == ids(read(codec, by_text).split(0.3)[1])


def test_long_prompts_are_left_out_and_counted(codec: TextCodec) -> None:
    rows = [*ROWS, {"id": "long", "prompt": "4 " * 200}]
    traffic = read(codec, rows)
    assert (traffic.num_rows, traffic.num_long, traffic.num_repeated) == (61, 1, 0)
    assert "long" not in ids(list(traffic.prompts))


def test_too_few_prompts_are_refused(codec: TextCodec) -> None:
    same = [{"id": str(i), "prompt": "ink"} for i in range(60)]
    for rows in (ROWS[:9], same):
        with pytest.raises(
            ConfigError, match=r"8 different prompts or more to learn from and 4 to judge by, got"
        ):
            read(codec, rows).split(0.3)


def test_halves_take_every_category_in_turns(codec: TextCodec) -> None:
    rows = [
        {"id": f"{kind}{i}", "category": kind, "prompt": f"{kind} {i}"} for kind in "abc" for i in range(6)
    ]
    learnt, judged = read(codec, rows).halves()
    assert not ids(learnt) & ids(judged)
    assert [prompt.category for prompt in learnt] == [prompt.category for prompt in judged] == [*"abc"] * 3


def test_general_prompts_that_the_traffic_has_are_left_out(codec: TextCodec) -> None:
    general = read(codec, [{"id": "g", "prompt": "Ink 4."}, {"id": "h", "prompt": "king"}])
    left = general.without(read(codec, ROWS))
    assert (ids(list(left.prompts)), left.num_repeated) == ({"h"}, 1)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 10), (0.5, 30)])
def test_general_prompts_make_their_share(share: float, count: int) -> None:
    prompts = [Prompt(str(i), "", (i,)) for i in range(30)]
    general = [Prompt(f"g{i}", "g", (100 + i,)) for i in range(7)]
    mixed = mix(prompts, general, share)
    added = mixed[30:]
    assert mixed[:30] == prompts
    assert len(added) == count
    assert len({prompt.id for prompt in added}) == count
    times = [sum(p.token_ids == g.token_ids for p in added) for g in general]
    assert max(times) - min(times) <= 1
