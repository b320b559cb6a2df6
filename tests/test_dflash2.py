"""DFlash 2: what convolutions and selector compute, that new ones change nothing, and that no draft changes a text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.checkpoint import zlab
from paceline.checkpoint.store import CONFIG, WEIGHTS, DrafterCheckpoint
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.noise import gumbel_row
from paceline.core.params import SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import Proposal, Request
from paceline.drafter.base import Blocks
from paceline.drafter.context import ContextKV
from paceline.drafter.dflash import DFlash
from paceline.drafter.dflash2 import BlockConv, DFlash2
from paceline.engine.tree import TreeDrafter
from paceline.target.native import NativeTarget
from paceline.testing import assert_lossless, tiny_drafter, tiny_target

BLOCK, NUM_ROWS = 4, 20
KEPT = torch.tensor([3, 8, 11, 20, 21, 33, 44, 59])
"""Tokens that a cut head may draft."""


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target(num_layers=5)


@pytest.fixture(scope="module")
def hidden(target: NativeTarget) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(NUM_ROWS, 2 * target.spec.hidden_size, generator=rng, dtype=torch.float64)


def random_drafter(target: NativeTarget, **kwargs: Any) -> DFlash2:
    drafter = tiny_drafter(target, BLOCK, variant="dflash2", **kwargs)
    assert isinstance(drafter, DFlash2)
    return drafter


def contexts_at(drafter: DFlash, hidden: torch.Tensor, lengths: Sequence[int]) -> list[ContextKV]:
    contexts = [drafter.open(length) for length in lengths]
    drafter.inject(contexts, [hidden[:length] for length in lengths])
    return contexts


def laws(target: NativeTarget, temperatures: Sequence[float]) -> list[Law]:
    return [
        Law(SamplingParams(temperature=t, seed=i), target.spec.vocab_size, seed=i)
        for i, t in enumerate(temperatures)
    ]


# Convolutions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2, 5])
@pytest.mark.parametrize(("taps", "size"), [(1, 8), (2, 8), (3, 4), (3, 32)])
def test_a_convolution_is_its_sum(taps: int, size: int, num_slots: int, target: NativeTarget) -> None:
    width, rng = 32, torch.Generator().manual_seed(5)
    config = replace(random_drafter(target).config, conv_kernel_size=taps, conv_group_size=size)
    conv = BlockConv(config).double()
    for parameter in conv.parameters():
        parameter.data.normal_(generator=rng)
    x = torch.randn(2, num_slots, width, generator=rng, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    got = conv(x, lambda rows: seen.append(rows) or rows.square())  # type: ignore[func-returns-value]
    coefficients = (x @ conv.kernel_projection.weight.T).view(2, num_slots, 2, taps, width // size)

    def summed(values: torch.Tensor, side: int) -> torch.Tensor:
        out = torch.zeros_like(values)
        for block, slot, channel in itertools.product(range(2), range(num_slots), range(width)):
            for tap in range(min(taps, slot + 1)):
                dynamic = coefficients[block, slot, side, tap, channel // size]
                kernel = conv.base_kernel[side, tap, channel] + dynamic
                out[block, slot, channel] += kernel * values[block, slot - tap, channel]
        return out

    torch.testing.assert_close(seen[0], summed(x, 0))
    torch.testing.assert_close(got, summed(seen[0].square(), 1))


def test_context_rows_are_not_convolved(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter, plain = random_drafter(target), tiny_drafter(target, BLOCK)
    plain.load_state_dict({name: drafter.state_dict()[name] for name in plain.state_dict()})
    plain.bind(target.heads)
    (context,), (expected,) = (contexts_at(d, hidden, [NUM_ROWS]) for d in (drafter, plain))
    for layer in range(2):
        for rows, plain_rows in zip(
            context.view(layer, None)[:2], expected.view(layer, None)[:2], strict=True
        ):
            assert torch.equal(rows, plain_rows)
    difference = drafter.draft_logits([1], [context], 3) - plain.draft_logits([1], [expected], 3)
    assert difference.abs().max() > 1e-2


# Selector ------------------------------------------------------------------------------------------------------------


def scores_behind(
    drafter: DFlash2, guesses_V: torch.Tensor, state_D: torch.Tensor, token: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a slot's candidates (rows of the head) and their scores behind `token`, one by one."""
    selector, allowed = drafter.candidate_selector, drafter._token_ids
    ids = torch.arange(len(guesses_V)) if allowed is None else allowed
    rows = guesses_V.argsort(descending=True)[: drafter.config.selector_top_k]
    gate = selector.predecessor_codebook[token] * (selector.hidden_projection.weight @ state_D)
    extra = torch.stack([(gate * selector.successor_codebook[ids[row]]).sum() for row in rows])
    return ids[rows], guesses_V[rows] + extra / (temperature or 1.0)


def perturbed(
    drafter: DFlash2, logits_KV: torch.Tensor, position: int, seed: int, heat: float
) -> torch.Tensor:
    if heat == 0:
        return logits_KV
    noise = torch.stack(
        [gumbel_row(seed, 0, position + k, 61, logits_KV.device) for k in range(len(logits_KV))]
    )
    return logits_KV / heat + (noise if drafter._token_ids is None else noise[:, drafter._token_ids])


CUT = pytest.mark.parametrize(
    "kept", [None, KEPT, KEPT[:3]], ids=["whole head", "cut head", "fewer than candidates"]
)


@CUT
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_chain_walks_the_selector(
    temperature: float, kept: torch.Tensor | None, target: NativeTarget, hidden: torch.Tensor
) -> None:
    drafter = random_drafter(target).bind(target.heads, kept)
    anchors, contexts = [7, 9, 30], contexts_at(drafter, hidden, [4, 17, 9])
    asked = laws(target, [temperature] * 3) if temperature else None
    proposals = drafter.draft(anchors, contexts, 3, asked)
    states = drafter._draft_states(anchors, contexts, 3)
    logits = drafter.draft_logits(anchors, contexts, 3)
    unary_paths = []
    for n, anchor in enumerate(anchors):
        guesses = perturbed(drafter, logits[n], contexts[n].length + 1, n, temperature)
        path, chances = [anchor], [1.0]
        for k in range(3):
            ids, scores = scores_behind(drafter, guesses[k], states[n, k], path[-1], temperature)
            path.append(int(ids[scores.argmax()]))
            covered = guesses[k].softmax(dim=-1).topk(len(ids)).values.sum()
            chances.append(chances[-1] * float(scores.softmax(dim=-1).max() * covered))
        assert Proposal(*outline(proposals[n])) == Proposal.chain(path[1:])
        assert proposals[n].chances == pytest.approx(chances[1:])
        unary_paths.append(guesses.argmax(dim=-1).tolist())
    if kept is None:
        assert [list(p.tokens) for p in proposals] != unary_paths, (
            "a selector without a say would show nothing"
        )
    assert [p.tokens[:2] for p in proposals] == [p.tokens for p in drafter.draft(anchors, contexts, 2, asked)]
    alone = [
        drafter.draft([anchors[n]], [contexts[n]], 3, asked and [asked[n]])[0] for n in range(len(anchors))
    ]
    assert list(map(outline, alone)) == list(map(outline, proposals))


@CUT
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("num_nodes", [1, 6, 40])
def test_a_tree_holds_the_likeliest_paths_of_the_lattice(
    num_nodes: int, temperature: float, kept: torch.Tensor | None, target: NativeTarget, hidden: torch.Tensor
) -> None:
    drafter = random_drafter(target).bind(target.heads, kept)
    anchors, contexts = [7, 30], contexts_at(drafter, hidden, [4, 17])
    trees = drafter.draft_trees(anchors, contexts, num_nodes, laws(target, [temperature] * 2))
    states = drafter._draft_states(anchors, contexts, 3)
    logits = drafter.draft_logits(anchors, contexts, 3)
    for n, anchor in enumerate(anchors):
        guesses = perturbed(drafter, logits[n], contexts[n].length + 1, n, temperature)
        paths: dict[tuple[int, ...], float] = {(): 0.0}
        for k in range(3):
            for path in [path for path in paths if len(path) == k]:
                before = path[-1] if path else anchor
                ids, scores = scores_behind(drafter, guesses[k], states[n, k], before, temperature)
                covered = guesses[k].softmax(dim=-1).topk(len(ids)).values.sum().log()
                for token, log_prob in zip(ids.tolist(), scores.log_softmax(dim=-1), strict=True):
                    paths[(*path, token)] = paths[path] + float(log_prob + covered)
        best = sorted((p for p in paths if p), key=lambda path: -paths[path])[:num_nodes]
        assert paths_of(trees[n]) == best


def outline(proposal: Proposal) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns what is drafted, without the chances, whose last bits depend on who travels along."""
    return proposal.tokens, proposal.parents


def paths_of(tree: Proposal) -> list[tuple[int, ...]]:
    """Returns the tokens on the way to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_rescoring_is_what_the_walk_sees(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter, anchors = random_drafter(target), torch.tensor([5, 12])
    ids = torch.tensor([[4, 7, 1, 9], [2, 2, 5, 8]])
    states = drafter.forward_blocks(
        [Blocks(hidden[:12], torch.arange(12), anchors, ids)], target.heads.embed_weight
    )
    unary, candidates = target.heads.lm_head(states).topk(5, dim=-1)
    got = drafter.rescore(states, candidates, unary, ids[:, :-1])
    for a, k in itertools.product(range(2), range(3)):
        logits = target.heads.lm_head(states[a, k])
        found, expected = scores_behind(drafter, logits, states[a, k], int(ids[a, k]), 0.0)
        assert torch.equal(found, candidates[a, k])
        torch.testing.assert_close(got[a, k], expected)


def test_the_gradient_of_both_losses_reaches_every_weight(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter = DFlash2(random_drafter(target).config).double()
    drafter.load_state_dict(random_drafter(target).state_dict())
    anchors, ids = torch.tensor([5, 12]), torch.tensor([[4, 7, 1, 9], [2, 3, 5, 8]])
    states = drafter.forward_blocks(
        [Blocks(hidden[:12], torch.arange(12), anchors, ids)], target.heads.embed_weight
    )
    unary, candidates = target.heads.lm_head(states).topk(5, dim=-1)
    drafter.rescore(states, candidates, unary, ids[:, :-1]).log_softmax(dim=-1)[..., 1].sum().backward()
    missed = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert missed == []


# Beginning with DFlash -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@CUT
def test_a_new_one_drafts_what_dflash_drafts(
    temperature: float, kept: torch.Tensor | None, target: NativeTarget, hidden: torch.Tensor
) -> None:
    plain = tiny_drafter(target, BLOCK).bind(target.heads, kept)
    config = replace(plain.config, variant="dflash2", selector_rank=4, conv_group_size=16)
    drafter = DFlash2.from_dflash(plain, config)
    assert drafter.config == config
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    drafter.bind(target.heads, kept)
    anchors, asked = [7, 9, 30], laws(target, [temperature] * 3)
    drafts = []
    for either in (plain, drafter):
        contexts = contexts_at(either, hidden, [4, 17, 9])
        chains = either.draft(anchors, contexts, 3, asked)
        drafts.append([*chains, *either.draft_trees(anchors, contexts, 12, asked)])
    assert list(map(outline, drafts[0])) == list(map(outline, drafts[1]))
    for known, new in zip(*drafts, strict=True):
        assert new.chances == pytest.approx(known.chances)


def test_a_new_one_learns_at_once(target: NativeTarget, hidden: torch.Tensor) -> None:
    """Neutral is not stuck: the first gradient moves all that makes up the difference to DFlash."""
    plain = tiny_drafter(target, BLOCK)
    drafter = DFlash2.from_dflash(plain, replace(plain.config, variant="dflash2"))
    ids = torch.tensor([[4, 7, 1, 9]])
    blocks = Blocks(hidden[:12], torch.arange(12), torch.tensor([12]), ids)
    states = drafter.forward_blocks([blocks], target.heads.embed_weight)
    unary, candidates = target.heads.lm_head(states).topk(5, dim=-1)
    scores = drafter.rescore(states, candidates, unary, ids[:, :-1])
    assert torch.equal(scores, unary)
    scores.log_softmax(dim=-1)[..., 1].sum().backward()
    new = [n for n, _ in drafter.named_parameters() if "conv" in n or "successor" in n]
    assert len(new) == 2 * 4 + 1
    assert all(drafter.get_parameter(name).grad.abs().max() > 0 for name in new)  # type: ignore[union-attr]


def test_another_shape_is_no_beginning(target: NativeTarget) -> None:
    plain = tiny_drafter(target, BLOCK)
    with pytest.raises(ConfigError, match="one of its own shape; block_size: expected 4, got 5"):
        DFlash2.from_dflash(plain, replace(plain.config, variant="dflash2", block_size=5))
    with pytest.raises(ConfigError, match="variant: expected dflash2, got dflash"):
        DFlash2.from_dflash(plain, plain.config)


# No text changes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [None, 1, 9])
@pytest.mark.parametrize("kept", [None, torch.arange(0, 61, 3)], ids=["whole head", "cut head"])
def test_no_text_changes(num_nodes: int | None, kept: torch.Tensor | None) -> None:
    target = tiny_target(seed=3)
    drafter = random_drafter(target).bind(target.heads, kept)
    requests = [
        Request(
            str(i), tuple(range(1, 4 + i)), SamplingParams(12 + i, temperature=t, seed=i, ignore_eos=True)
        )
        for i, t in enumerate((0.0, 1.0, 0.4, 0.0, 1.3))
    ]
    chosen = drafter if num_nodes is None else TreeDrafter(drafter, num_nodes)
    assert_lossless(target, chosen, requests, max_sequences=3)


# At rest -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, target: NativeTarget) -> Path:
    """A saved drafter."""
    DrafterCheckpoint.of(random_drafter(target), torch.float32, {}).save(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_a_round_trip_changes_no_bit(folder: Path, target: NativeTarget) -> None:
    drafter, loaded = random_drafter(target), DrafterCheckpoint.load(folder)
    assert loaded.config == drafter.config
    assert {name: tuple(t.shape) for name, t in loaded.tensors.items()} == zlab.manifest(drafter.config)
    assert len(loaded.tensors) == 15 * 2 + 6
    assert loaded.tensors["candidate_selector.successor_codebook"].shape == (61, 8)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.tensors[name], tensor.float()), name
    built = loaded.build(torch.float64)
    assert isinstance(built, DFlash2)


def test_the_config_says_what_it_is_where_engines_look(folder: Path) -> None:
    raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    assert raw["architectures"] == ["DFlash2DraftModel"]
    assert raw["dflash_config"] == {
        "mask_token_id": 60,
        "target_layer_ids": [0, 1],
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 8,
        "selector_top_k": 5,
    }


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
def test_a_config_without_its_sizes_is_refused(key: str, folder: Path) -> None:
    raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    del raw["dflash_config"][key]
    (folder / CONFIG).write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"{key}: expected in dflash_config"):
        DrafterCheckpoint.load(folder)


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{name}.weight"] = tensors.pop(f"candidate_selector.{name}")


@pytest.mark.parametrize(
    ("edit", "messages"),
    [
        (
            renamed,
            [
                "missing candidate_selector.successor_codebook (61, 8)",
                "unknown .*predecessor_codebook.weight (61, 8)",
            ],
        ),
        (
            lambda tensors: tensors.pop("candidate_selector.predecessor_codebook"),
            ["missing candidate_selector.predecessor_codebook (61, 8)"],
        ),
        (
            lambda tensors: tensors.pop("layers.1.mlp_conv.base_kernel"),
            ["missing layers.1.mlp_conv.base_kernel (2, 2, 32)"],
        ),
    ],
    ids=["suffixed codebooks", "a codebook missing", "a kernel missing"],
)
def test_a_half_selector_is_refused_by_name(
    edit: Callable[[dict[str, torch.Tensor]], object], messages: list[str], folder: Path
) -> None:
    tensors = dict(DrafterCheckpoint.load(folder).tensors)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError) as caught:
        DrafterCheckpoint.load(folder)
    for message in messages:
        assert all(part in str(caught.value) for part in message.split(".*")), message
