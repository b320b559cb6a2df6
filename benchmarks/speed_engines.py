"""Part `engines` of `speed.py`: the same pair in other implementations, in turns with ours.

An engine that cannot run stands in the result with the reason it gave; nothing stands in for it.
"""

from __future__ import annotations

import json
import operator
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer

from paceline import __version__
from paceline.bench.arms.base import ArmError
from paceline.bench.arms.oracles import (
    Oracle,
    Trace,
    Transformers,
    TransformersDFlash,
    ZLab,
    drafter_of,
    load_target,
)
from paceline.core.errors import PacelineError
from paceline.core.params import SamplingParams
from paceline.engine.engine import Engine
from paceline.llm import LLM
from speed_results import Row, without_folders
from speed_timing import Timed, decode, turn

WORKER = Path(__file__).resolve().parent / "speed_worker.py"
MAX_POSITIONS, LOG_LINES, MAX_REASON = 2048, 4, 400
_EVAL = re.compile(r"(?<!prompt )\beval time =\s*([\d.]+) ms /\s*(\d+) (?:runs|tokens)")
_PROMPT = re.compile(r"prompt eval time =\s*([\d.]+) ms")


class Other(Protocol):
    """An engine in turns."""

    def open(self) -> str:
        """Makes it ready and returns its name and version. Raises anything where it cannot run."""

    def answer(self, prompt: tuple[int, ...], max_new_tokens: int) -> Timed:
        """Decodes greedily."""

    def close(self) -> None:
        """Frees it; harmless when not open."""


def of_trace(run: Callable[[], Trace], *, drafts: bool = False) -> Timed:
    """Returns what an oracle's answer took; the first token closes the prompt."""
    began = time.perf_counter()
    trace = run()
    whole_s = time.perf_counter() - began
    later = trace.sizes[1:]
    return Timed(
        sum(later),
        trace.times[-1] - trace.times[0],
        len(trace.ids),
        whole_s,
        len(later) if drafts else 0,
        sum(later) - len(later) if drafts else 0,
        (tuple(trace.ids),),
    )


class Ours:
    """Our own engine."""

    def __init__(self, new_engine: Callable[[], Engine]) -> None:
        self._new_engine = new_engine

    def open(self) -> str:
        """See `Other`."""
        self._engine = self._new_engine()
        return f"paceline {__version__}"

    def answer(self, prompt: tuple[int, ...], max_new_tokens: int) -> Timed:
        """See `Other`."""
        return decode(self._engine, [prompt], [SamplingParams(max_new_tokens)])

    def close(self) -> None:
        """See `Other`."""


class InProcess:
    """Another implementation in this process; see `paceline.bench.arms.oracles`."""

    def __init__(self, oracle: Oracle, llm: LLM, target: Callable[[], Any], *, drafts: bool) -> None:
        self._oracle, self._llm, self._target, self._drafts = oracle, llm, target, drafts

    def open(self) -> str:
        """See `Other`."""
        self._oracle.open(self._llm, self._target())
        return self._oracle.engine

    def answer(self, prompt: tuple[int, ...], max_new_tokens: int) -> Timed:
        """See `Other`."""
        params = SamplingParams(max_new_tokens)
        return of_trace(lambda: self._oracle.decode(prompt, params), drafts=self._drafts)

    def close(self) -> None:
        """See `Other`."""
        self._oracle.close()


class Worker:
    """An engine in another Python; see `speed_worker.py`.

    Args:
        kind, python: which engine, and the program that has it.
        settings: see there.
        timeout_s: of one answer, and of getting ready.
    """

    def __init__(self, kind: str, python: Path | None, settings: Mapping[str, Any], timeout_s: float) -> None:
        self._kind, self._python, self._settings, self._timeout_s = kind, python, settings, timeout_s
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> str:
        """See `Other`."""
        if self._python is None:
            raise ArmError(f"not asked for; hint: --{self._kind}-python PYTHON")
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, closed in close
        self._process = subprocess.Popen(
            [str(self._python), str(WORKER), self._kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        return str(self._ask(self._settings)["engine"])

    def answer(self, prompt: tuple[int, ...], max_new_tokens: int) -> Timed:
        """See `Other`."""
        said = self._ask({"prompt": list(prompt), "max_new_tokens": max_new_tokens})
        ids = tuple(said["ids"])
        counts = (said.get("num_steps", 0), said.get("num_accepted", 0))
        return Timed(len(ids) - 1, said["seconds"], len(ids), said["whole_s"], *counts, (ids,))

    def _ask(self, line: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        watch = Timer(self._timeout_s, process.kill)
        watch.start()
        try:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watch.cancel()
        if not answer:
            raise ArmError(f"it ended without an answer (exit code {process.wait()}): {self._last_words()}")
        said: dict[str, Any] = json.loads(answer)
        if "error" in said:
            raise ArmError(said["error"])
        return said

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return " | ".join(lines[-LOG_LINES:]) or "it said nothing"

    def close(self) -> None:
        """See `Other`."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._log.close()
            self._process = None


class LlamaProgram:
    """llama.cpp's command-line program, started anew for each prompt; its own times are taken.

    Args:
        program: `llama-completion`, or an older `llama-cli`.
        gguf: the model.
        folder: the target's, for the text of token ids.
    """

    def __init__(self, program: Path, gguf: Path | None, folder: Path) -> None:
        self._program, self._gguf, self._folder = program, gguf, folder

    def open(self) -> str:
        """See `Other`."""
        if self._gguf is None:
            raise ArmError("no model; hint: --gguf FILE")
        self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        said = subprocess.run([str(self._program), "--version"], capture_output=True, text=True, check=True)
        return f"llama.cpp {(said.stderr + said.stdout).strip().splitlines()[0]}"

    def answer(self, prompt: tuple[int, ...], max_new_tokens: int) -> Timed:
        """See `Other`."""
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
            file.write(text)
            file.flush()
            words = [str(self._program), "-m", str(self._gguf), "-f", file.name, "-n", str(max_new_tokens)]
            words += ["--temp", "0", "-c", str(MAX_POSITIONS), "-t", str(torch.get_num_threads()), "-no-cnv"]
            said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        return llama_times(said.stderr + said.stdout)

    def close(self) -> None:
        """See `Other`."""


def llama_times(log: str) -> Timed:
    """Returns what llama.cpp says of its own times; the token that closes the prompt is no run. Pure.

    Raises:
        ArmError: it says nothing.
    """
    decoding, reading = _EVAL.search(log), _PROMPT.search(log)
    if decoding is None or reading is None:
        raise ArmError(f"expected llama.cpp's times, got {log[-200:]!r}")
    seconds, num_tokens = float(decoding[1]) / 1000, int(decoding[2])
    return Timed(num_tokens, seconds, num_tokens + 1, seconds + float(reading[1]) / 1000)


# All of them ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Places:
    """Where other engines are.

    Args:
        vllm_python, openvino_python, llama_python: Pythons that have them.
        vllm_eager: leave vLLM's graph compiler out.
        openvino_folder: exported models, made there where they are missing.
        llama_cli, gguf: llama.cpp's program, and its model.
        timeout_s: of one answer.
    """

    vllm_python: Path | None = None
    vllm_eager: bool = True
    openvino_python: Path | None = None
    openvino_folder: Path | None = None
    llama_python: Path | None = None
    llama_cli: Path | None = None
    gguf: Path | None = None
    timeout_s: float = 900.0


def others(llm: LLM, places: Places, drafter: Path) -> dict[str, Other]:
    """Returns all engines by name, none of them open; ours plain and ours as the pair drafts come first.

    Args:
        drafter: folder to which the pair's drafter was saved, in z-lab's layout.
    """
    models: list[Any] = []

    def target() -> Any:
        if not models:
            models.append(load_target(llm))
        return models[0]

    def worker(kind: str, python: Path | None, options: Mapping[str, Any], *, drafts: bool) -> Worker:
        return Worker(kind, python, _settings(llm, drafter if drafts else None, options), places.timeout_s)

    eager = {"enforce_eager": places.vllm_eager}
    folder = {"folder": str(places.openvino_folder or drafter.parent / "openvino")}
    gguf = {"gguf": None if places.gguf is None else str(places.gguf)}
    llama: Other = worker("llama", places.llama_python, gguf, drafts=False)
    if places.llama_cli is not None:
        llama = LlamaProgram(places.llama_cli, places.gguf, llm.folder)
    return {
        "plain": Ours(lambda: llm.new_engine(plain=True, max_sequences=1)),
        "dflash": Ours(lambda: llm.new_engine(max_sequences=1)),
        "chain": Ours(lambda: llm.new_engine(drafter=llm.neural, max_sequences=1)),
        "transformers": InProcess(Transformers(), llm, target, drafts=False),
        "transformers dflash": InProcess(TransformersDFlash(), llm, target, drafts=True),
        "z-lab dflash": InProcess(ZLab(), llm, target, drafts=True),
        "vllm": worker("vllm", places.vllm_python, eager, drafts=False),
        "vllm dflash": worker("vllm", places.vllm_python, eager, drafts=True),
        "openvino": worker("openvino", places.openvino_python, folder, drafts=False),
        "openvino dflash": worker("openvino", places.openvino_python, folder, drafts=True),
        "llama.cpp 4-bit": llama,
    }


def _settings(llm: LLM, drafter: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "target": str(llm.folder),
        "drafter": None if drafter is None else str(drafter),
        "num_drafts": llm.neural.block_size - 1 if llm.neural else 0,
        "num_threads": torch.get_num_threads(),
        "eos_token_ids": list(llm.codec.eos_token_ids),
        "max_positions": MAX_POSITIONS,
        "options": dict(options),
    }


def measure_engines(llm: LLM, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, places: Places) -> Row:
    """Returns samples of every engine that runs, prompt by prompt in turns, and why the others do not."""
    with tempfile.TemporaryDirectory() as folder:
        drafter = Path(folder) / "drafter"
        drafter_of(llm).save(drafter)
        arms = others(llm, places, drafter)
        try:
            return run_in_turns(arms, prompts, max_new_tokens)
        finally:
            for arm in arms.values():
                arm.close()


def run_in_turns(arms: Mapping[str, Other], prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> Row:
    """Returns samples by engine, and the reasons of those that failed, whose samples are dropped.

    Ours must not fail: its error is raised.
    """
    versions: dict[str, str] = {}
    absent: dict[str, str] = {}
    done: dict[str, list[Timed]] = {name: [] for name in arms}

    def fail(name: str, error: Exception, when: str) -> None:
        if isinstance(arms[name], Ours):
            raise error
        absent[name] = f"{when}: {reason(error)}"
        print(f"{name}: {absent[name]}", file=sys.stderr, flush=True)

    for name, arm in arms.items():
        try:
            versions[name] = arm.open()
            arm.answer(prompts[0], max_new_tokens)  # warms up
        except Exception as error:  # another project's code may raise anything
            fail(name, error, "before the first prompt")
    for i, prompt in enumerate(prompts):
        for name in turn([name for name in arms if name not in absent], i):
            try:
                done[name].append(arms[name].answer(prompt, max_new_tokens))
            except Exception as error:
                fail(name, error, f"at prompt {i}")
    there = {name: timed for name, timed in done.items() if name not in absent}
    texts = {name: [each.texts for each in timed] for name, timed in there.items()}
    return {
        "num_texts": len(prompts),
        "versions": {name: versions[name] for name in there},
        "absent": absent,
        "num_same": {
            name: sum(map(operator.eq, said, texts["plain"]))
            for name, said in texts.items()
            if name != "plain" and all(said)
        },
        "samples": {name: [each.sample for each in timed] for name, timed in there.items()},
    }


def reason(error: Exception) -> str:
    """Returns in one line why an engine failed, with the error's class where it is not one of ours. Pure."""
    said = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    return without_folders(" ".join(said.split()))[:MAX_REASON]
