"""Parts `pairs`, `cells` and `growth` of `speed.py`: the pair as `LLM` has it against its own plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from paceline.bench.arms.local import local_arm
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.engine.runtime import peak_memory_bytes, reset_peak_memory
from paceline.llm import LLM
from speed_results import Row
from speed_timing import Timed, decode, prompts_of, turn

SETS = ("gsm8k_test", "mbpp", "mt_bench", "support", "code_edit")
BATCHES = (1, 2, 4, 8, 16)
KINDS = {
    "math": ("gsm8k_test", ""),
    "code": ("mbpp", ""),
    "completion": ("humaneval", ""),
    "bug fixes": ("code_edit", "code_fix"),
    "edits": ("code_edit", "code_edit"),
    "chat": ("mt_bench", ""),
    "questions": ("spec_bench", "qa"),
    "retrieval": ("spec_bench", "rag"),
    "support": ("support", ""),
    "tools": ("tool_calling", ""),
    "languages": ("multilingual", ""),
    "long texts": ("long_context", "long_2k"),
}
"""Kinds of work: a file, and what its rows' categories begin with."""

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
GROWTH_BATCHES = (1, 2, 4, 8, 16, 32)
BOOK, SLICE = "long_context", 8


def arms_of(llm: LLM, batch: int) -> dict[str, Engine]:
    """Returns an engine without and one with the pair's drafter, for all prompts of a place."""
    return {
        "plain": llm.new_engine(plain=True, max_sequences=batch),
        "dflash": llm.new_engine(max_sequences=batch),
    }


def compare(
    llm: LLM, prompts: Sequence[tuple[int, ...]], batch: int, temperature: float, max_new_tokens: int
) -> Row:
    """Returns samples of plain decoding and of the pair, batch by batch in turns, and how many texts are the same."""
    engines = arms_of(llm, batch)
    samples: dict[str, list[list[float]]] = {name: [] for name in engines}
    num_same = num_texts = 0
    for number, start in enumerate(range(0, len(prompts), batch)):
        group = prompts[start : start + batch]
        params = [
            SamplingParams(max_new_tokens, temperature=temperature, seed=start + i) for i in range(len(group))
        ]
        done = {name: decode(engines[name], group, params) for name in turn(list(engines), number)}
        num_texts += len(group)
        num_same += sum(a == b for a, b in zip(*(timed.texts for timed in done.values()), strict=True))
        for name, timed in done.items():
            samples[name].append(timed.sample)
    return {"num_texts": num_texts, "num_same": {"dflash": num_same}, "samples": samples}


def warm_up(llm: LLM) -> None:
    """Runs both ways once, so that neither pays for what is set up at first use."""
    prompt = tuple(llm.render("Say hello."))
    for engine in arms_of(llm, 1).values():
        decode(engine, [prompt], [SamplingParams(16)])


def whole_batches(num_prompts: int, batch: int) -> int:
    """Returns as many prompts, rounded up to whole batches. Pure."""
    return -(-num_prompts // batch) * batch


@dataclass(frozen=True, slots=True)
class Places:
    """Where the pair is compared.

    Args:
        data: folder of prompt files.
        num_prompts: at each place, at least; batches are whole.
        max_new_tokens: of each text.
        temperatures: above 0 with a seed a prompt.
    """

    data: Path
    num_prompts: int
    max_new_tokens: int
    temperatures: Sequence[float]


def measure_pairs(llm: LLM, places: Places, sets: Sequence[str], batches: Sequence[int]) -> Iterator[Row]:
    """Yields a row for each set, temperature and batch."""
    for name in sets:
        for temperature in places.temperatures:
            for batch in batches:
                where = {"set": name, "temperature": temperature, "batch": batch}
                yield {**where, **_compare_set(llm, places, (name, ""), temperature, batch)}


def measure_cells(llm: LLM, places: Places, cells: Sequence[tuple[str, int]]) -> Iterator[Row]:
    """Yields a row for each kind of work and batch."""
    for kind, batch in cells:
        for temperature in places.temperatures:
            where = {"kind": kind, "batch": batch, "temperature": temperature}
            yield {**where, **_compare_set(llm, places, KINDS[kind], temperature, batch)}


def _compare_set(llm: LLM, places: Places, work: tuple[str, str], temperature: float, batch: int) -> Row:
    file, category = work
    count = whole_batches(places.num_prompts, batch)
    prompts = prompts_of(places.data / f"{file}.jsonl", count, llm.render, category)
    return compare(llm, prompts, batch, temperature, places.max_new_tokens)


def chosen_cells(patterns: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the cells that patterns name, such as "math", "math:8" or "*:16"; all where there are none. Pure."""
    cells = [(kind, batch) for kind in KINDS for batch in BATCHES]
    unknown = [p for p in patterns if not any(_names(p, cell) for cell in cells)]
    if unknown:
        raise SystemExit(
            f"--cells: expected KIND, KIND:BATCH or *:BATCH of {', '.join(KINDS)} and {BATCHES}; got {unknown[0]!r}"
        )
    return [cell for cell in cells if not patterns or any(_names(p, cell) for p in patterns)]


def _names(pattern: str, cell: tuple[str, int]) -> bool:
    kind, batch = cell
    return fnmatchcase(f"{kind}:{batch}", pattern if ":" in pattern else f"{pattern}:*")


# Growth --------------------------------------------------------------------------------------------------------------


def measure_growth(
    llm: LLM, data: Path, max_new_tokens: int, contexts: Sequence[int], batches: Sequence[int]
) -> Iterator[Row]:
    """Yields a row for each context length, one sequence, and for each batch at the shortest context."""
    items = prompts_of(
        data / f"{BOOK}.jsonl", 1, lambda messages: llm.codec.encode(messages[-1]["content"]), "long_32k"
    )
    book = items[0]
    room = llm.target.spec.max_positions - max_new_tokens
    per_token = local_arm("dflash", "dflash", {}, llm).open().memory
    places = [("context", n, min(n, room), 1) for n in contexts]
    places += [("batch", n, min(CONTEXTS[0], room), n) for n in batches]
    for axis, value, length, batch in places:
        prompts = [book[i * length : (i + 1) * length] for i in range(batch)]
        if len(prompts[-1]) < length:
            raise SystemExit(f"growth: {BOOK}.jsonl is too short for {batch} prompts of {length} tokens")
        counts = reset_peak_memory(llm.device)
        row = slices(llm, prompts, max_new_tokens)
        yield {
            "axis": axis,
            "value": value,
            "num_prompt_tokens": length,
            "batch": batch,
            "bytes_per_sequence": {
                name: (length + max_new_tokens) * per_token.get(f"{name}_kv_per_token", 0)
                for name in ("target", "drafter")
            },
            "peak_memory_bytes": peak_memory_bytes(llm.device) if counts else None,
            **row,
        }


def slices(llm: LLM, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> Row:
    """Returns samples of both ways in slices of a few tokens each, in turns, over the same texts.

    Texts go on beyond their end, so that every place has as many sequences from the first slice to the last.
    """
    engines = arms_of(llm, len(prompts))
    params = SamplingParams(max_new_tokens, ignore_eos=True)
    prefill_s, samples = dict.fromkeys(engines, 0.0), {name: list[list[float]]() for name in engines}
    texts = {name: [list[int]() for _ in prompts] for name in engines}

    def run(name: str, is_enough: Callable[[int], bool]) -> Timed:
        engine, num_tokens, started = engines[name], 0, time.perf_counter()
        while engine.has_work and not is_enough(num_tokens):
            for delta in engine.step():
                texts[name][int(delta.request_id)] += delta.token_ids
                num_tokens += len(delta.token_ids)
        seconds = time.perf_counter() - started
        return Timed(num_tokens, seconds, num_tokens, seconds)

    for name, engine in engines.items():
        for i, prompt in enumerate(prompts):
            engine.add(Request(str(i), prompt, params))
        prefill_s[name] = round(run(name, lambda _, name=name: all(texts[name])).seconds, 6)  # type: ignore[misc]
    number = 0
    while all(engine.has_work for engine in engines.values()):
        for name in turn(list(engines), number):
            samples[name].append(run(name, lambda n: n >= SLICE * len(prompts)).sample)
        number += 1
    for engine in engines.values():
        engine.close()
    lengths = [min(map(len, both)) for both in zip(*texts.values(), strict=True)]
    same = [a[:n] == b[:n] for a, b, n in zip(*texts.values(), lengths, strict=True)]
    return {
        "num_texts": len(prompts),
        "num_same": {"dflash": sum(same)},
        "prefill_s": prefill_s,
        "samples": samples,
    }
