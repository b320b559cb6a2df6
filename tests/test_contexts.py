"""Long and odd contexts: what a drafter saw stands where it belongs, at any length, in any batch, after any end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.core.block import attends
from paceline.core.types import EMPTY_PROPOSAL, Proposal, Request
from paceline.drafter.base import Drafter
from paceline.drafter.context import ContextKV
from paceline.drafter.dflash import DFlash
from paceline.engine import step as engine_step
from paceline.engine.engine import Engine
from paceline.engine.tree import TreeDrafter
from paceline.target.base import VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import (
    OracleDrafter,
    assert_lossless,
    plain_texts,
    run_checked,
    tiny_drafter,
    tiny_target,
    whole,
)
from watching import (
    BLOCK,
    TAPS,
    WINDOWS,
    Counting,
    Drafts,
    Watched,
    all_slots_are_free,
    prepared,
    request,
    tokens,
)

# A reference without contexts, windows of views, pieces or batches ----------------------------------------------------


def rotated(x_RHE: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding as a product of complex numbers."""
    half = x_RHE.shape[-1] // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x_RHE[..., :half], x_RHE[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def reference_logits(
    drafter: DFlash, target: NativeTarget, hidden: torch.Tensor, anchor: int
) -> torch.Tensor:
    """What a drafter should say behind `anchor` at position len(hidden), (K, V): one dense pass over everything."""
    config, weights = drafter.config, dict(drafter.state_dict())
    start, slots = hidden.shape[0], config.block_size

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        normed: torch.Tensor = x * scale * weights[f"{name}.weight"]
        return normed

    ids = torch.tensor([anchor] + [config.mask_token_id] * (slots - 1))
    x, positions = target.heads.embed_weight[ids], torch.arange(start + slots)
    context = norm(hidden @ weights["fc.weight"].T, "hidden_norm")
    query, behind, block = positions[start:, None], positions[None, :start], positions[None, start:]
    for i, rule in enumerate(config.layer_rules):
        layer, attention = f"layers.{i}", f"layers.{i}.self_attn"
        normed = norm(x, f"{layer}.input_layernorm")
        both = torch.cat([context, normed])

        def project(rows: torch.Tensor, name: str, attention: str = attention) -> torch.Tensor:
            heads: torch.Tensor = rows @ weights[f"{attention}.{name}_proj.weight"].T
            return heads.view(len(rows), -1, config.head_dim)

        q = rotated(norm(project(normed, "q"), f"{attention}.q_norm"), positions[start:], config.rope_theta)
        k = rotated(norm(project(both, "k"), f"{attention}.k_norm"), positions, config.rope_theta)
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), project(both, "v").repeat_interleave(group, 1)
        sees = [
            attends(query, behind, start, rule, in_block=False),
            attends(query, block, start, rule, in_block=True),
        ]
        scores = torch.einsum("qhe,khe->hqk", q, k) * config.head_dim**-0.5
        scores = scores.masked_fill(~torch.cat(sees, dim=1), -torch.inf)
        attended = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).reshape(slots, -1)
        x = x + attended @ weights[f"{attention}.o_proj.weight"].T
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (normed @ weights[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    logits: torch.Tensor = norm(x, "norm")[1:] @ target.heads.head_weight.T
    return logits


def hidden_rows(target: NativeTarget, text: Sequence[int]) -> torch.Tensor:
    """All tapped rows of a text, from one pass of an empty session."""
    target.tap(TAPS)
    session = target.open(len(text))
    (output,) = target.verify([VerifyRows(session, text, EMPTY_PROPOSAL, last_row_only=True)])
    session.close()
    return output.hidden


LENGTHS = (1, BLOCK - 2, 29, 512, 513, 1025)
"""One token; shorter than a block; a window that fills up while decoding; one piece of a prefill, two and three."""


@pytest.fixture(scope="module")
def long_target() -> NativeTarget:
    return tiny_target(max_positions=1100)


class Measured(Watched):
    """Notes the logits behind the drafts too."""

    def __init__(self, drafter: DFlash) -> None:
        super().__init__(drafter)
        self.dflash, self.logits = drafter, dict[tuple[int, int], torch.Tensor]()

    def draft(self, anchors: Sequence[int], contexts: Sequence[Any], *asked: Any) -> list[Proposal]:
        logits = self.dflash.draft_logits(anchors, contexts, self.dflash.config.num_draft_tokens)
        for context, rows in zip(contexts, logits, strict=True):
            number = next(n for n, known in enumerate(self.contexts) if known is context)
            self.logits[number, context.length] = rows
        return super().draft(anchors, contexts, *asked)


@pytest.mark.parametrize("windows", WINDOWS)
def test_drafts_are_those_of_a_dense_pass_at_every_length(windows: str, long_target: NativeTarget) -> None:
    made = [request(str(length), tokens(length, seed=length), 6) for length in LENGTHS]
    drafter = prepared(long_target, windows)
    measured = Measured(drafter)
    texts = assert_lossless(long_target, measured, made, max_sequences=3)
    hidden = [hidden_rows(long_target, whole(text)) for text in texts]
    for (number, position), logits in measured.logits.items():
        anchor = whole(texts[number])[position]
        expected = reference_logits(drafter, long_target, hidden[number][:position], anchor)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
        drafted, _ = measured.drafts[number][position]
        assert drafted == tuple(expected.argmax(-1).tolist())
    assert len(measured.logits) >= 4 * len(made)


def test_the_reference_can_tell_windows_and_positions_apart(long_target: NativeTarget) -> None:
    """What the test above finds: a window that is ignored or one off, rows out of place, row counts for positions."""
    text = tokens(200)
    hidden, drafter = hidden_rows(long_target, text), prepared(long_target, "window 30")

    def say(drafter: DFlash, rows: torch.Tensor) -> torch.Tensor:
        return reference_logits(drafter, long_target, rows, text[-1])

    right = say(drafter, hidden)
    for window in (29, 31, 2048):
        drafter.config = replace(drafter.config, sliding_window=window)
        assert (say(drafter, hidden) - right).abs().max() > 1e-4
    full = prepared(long_target)
    for wrong in (hidden.roll(1, 0), hidden[-40:], hidden[:-1]):
        assert (say(full, wrong) - say(full, hidden)).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("length", "num_pieces"), [(1, 1), (511, 1), (512, 1), (513, 2), (1024, 2), (1025, 3)]
)
def test_a_prompt_in_pieces_is_injected_whole(
    length: int, num_pieces: int, long_target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, contexts = prepared(long_target), list[ContextKV]()
    for longest in (512, 5000):
        monkeypatch.setattr(engine_step, "PREFILL_ROWS", longest)
        watched, passes = Watched(drafter), Counting(long_target, monkeypatch)
        engine = Engine(long_target, watched)
        engine.add(request("a", tokens(length), 1))
        while engine.has_work:
            engine.step()
        contexts += watched.contexts
        assert passes.num_passes == (num_pieces if longest == 512 else 1)
        monkeypatch.undo()
    for layer in range(2):
        for pieces, at_once in zip(*(c.view(layer, None)[:2] for c in contexts), strict=True):
            assert pieces.shape[1] == length
            torch.testing.assert_close(pieces, at_once, rtol=0, atol=1e-10)


# Batches: each sequence drafts what it drafts alone ------------------------------------------------------------------


def uneven() -> list[Request]:
    """Eleven requests that differ in everything; some of them run into the end of the positions."""
    made = []
    for i in range(11):
        prompt, law = tokens(1 + 7 * i % 40, seed=i), {"temperature": float(i % 3 == 1), "seed": i}
        one = request(str(i), prompt, 6 + 2 * i, **law)
        made.append(replace(one, block_size=None if i % 4 == 0 else 2 + i % 5))
    return [*made, request("full", tokens(64 - 9, seed=99), 9)]


def drafts_of(target: NativeTarget, drafter: DFlash | TreeDrafter, made: Sequence[Request]) -> list[Drafts]:
    """What stood before the target, by request: drafts cut to the rows that were verified."""
    watched = Watched(drafter)
    texts = run_checked(Engine(target, watched, max_sequences=len(made)), made)
    cut = []
    for number, one in enumerate(made):
        sizes = {step.position - 1: step.num_drafted for step in texts[one.id].steps if step.num_drafted}
        noted = watched.drafts[number]
        cut.append({at: (noted[at][0][:size], noted[at][1][:size]) for at, size in sizes.items()})
    return cut


@pytest.mark.parametrize(
    ("windows", "trees"),
    [
        ("full", False),
        ("full", True),
        ("window of a block", False),
        ("window 30", False),
        ("window 30", True),
    ],
)
def test_drafts_do_not_depend_on_who_travels_along(windows: str, trees: bool) -> None:
    target = tiny_target(max_positions=64)
    dflash = prepared(target, windows)
    drafter = TreeDrafter(dflash, 9) if trees else dflash
    together = drafts_of(target, drafter, uneven())
    alone = [drafts_of(target, drafter, [one])[0] for one in uneven()]
    assert together == alone
    assert len({len(tokens) for drafts in alone for tokens, _ in drafts.values()}) > 3, "widths are uneven"


# The end of the positions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("kind", ["oracle", "dflash", "trees"])
def test_a_block_grows_narrow_at_the_last_position(kind: str, max_new_tokens: int) -> None:
    target = tiny_target(max_positions=64)
    made = [request("full", tokens(64 - max_new_tokens), max_new_tokens), request("short", (1, 2), 7)]
    dflash = tiny_drafter(target, 16)
    drafters: dict[str, Drafter] = {
        "oracle": OracleDrafter(16, [whole(text) + (7,) * 16 for text in plain_texts(target, made)]),
        "dflash": dflash,
        "trees": TreeDrafter(dflash, 20),
    }
    full, _ = assert_lossless(target, drafters[kind], made)
    assert len(whole(full)) == 64 and full.finish_reason == "length"
    assert all(step.position + step.num_drafted <= 64 for step in full.steps)
    if kind == "oracle":
        assert [step.num_drafted for step in full.steps] == {
            1: [], 2: [1], 5: [4], 9: [8], 40: [15, 15, 7]
        }[max_new_tokens]  # fmt: skip
    assert all_slots_are_free(target)
