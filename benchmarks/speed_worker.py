"""Another engine in a Python of its own, for `speed.py engines`: it reads requests from stdin and answers on stdout.

    PYTHON speed_worker.py KIND      KIND is vllm, openvino or llama

A line is a JSON object. The first one holds the settings; the answer to it says which engine is ready, or what is
wrong. Every further one is a request: `prompt` (token ids) and `max_new_tokens`. Nothing of the package is imported
here, since the other Python need not have it. Decoding is greedy, in float32, on as many threads as ours.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
Decode = Callable[[list[int], int], Answer]


def open_vllm(settings: dict[str, Any]) -> tuple[str, Decode]:
    """Returns vLLM's name and how it decodes; a drafter is taken in z-lab's layout."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
    )
    vllm = importlib.import_module("vllm")
    speculation = {
        "method": "dflash",
        "model": settings["drafter"],
        "num_speculative_tokens": settings["num_drafts"],
    }
    llm = vllm.LLM(
        model=settings["target"],
        dtype="float32",
        max_model_len=settings["max_positions"],
        max_num_batched_tokens=settings["max_positions"],
        max_num_seqs=1,
        enforce_eager=settings["options"].get("enforce_eager", True),
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation if settings["drafter"] else None,
    )

    def counters() -> list[int]:
        counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        return [int(counted.get(name, 0)) for name in names]

    def decode(prompt: list[int], max_new_tokens: int) -> Answer:
        params = vllm.SamplingParams(
            max_tokens=max_new_tokens,
            temperature=0.0,
            stop_token_ids=settings["eos_token_ids"],
            detokenize=False,
        )
        before = counters()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        steps, accepted = (now - then for now, then in zip(counters(), before, strict=True))
        times = output.metrics
        return {
            "ids": list(output.outputs[0].token_ids),
            "seconds": times.last_token_ts - times.first_token_ts,
            "num_steps": steps,
            "num_accepted": accepted,
        }

    return f"vllm {_version('vllm-cpu', 'vllm')}", decode


def open_openvino(settings: dict[str, Any]) -> tuple[str, Decode]:
    """Returns OpenVINO GenAI's name and how it decodes; what is not exported yet is exported first."""
    genai, openvino = (importlib.import_module(name) for name in ("openvino_genai", "openvino"))
    numpy = importlib.import_module("numpy")
    folder = Path(settings["options"]["folder"])
    properties = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": settings["num_threads"],
    }
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1
    beside = {}
    if settings["drafter"]:
        drafter = _exported(settings["drafter"], folder / "drafter", is_drafter=True)
        beside["draft_model"] = genai.draft_model(drafter, "CPU", **properties)
    target = _exported(settings["target"], folder / "target", is_drafter=False)
    pipe = genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **properties, **beside)

    def decode(prompt: list[int], max_new_tokens: int) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = max_new_tokens, False
        config.apply_chat_template = False
        config.stop_token_ids = set(settings["eos_token_ids"])
        if settings["drafter"]:
            config.num_assistant_tokens = settings["num_drafts"]
        ids = numpy.array([prompt], dtype=numpy.int64)
        started = time.perf_counter()
        result = pipe.generate(openvino.Tensor(ids), config)
        whole_s = time.perf_counter() - started
        answer = {
            "ids": list(result.tokens[0]),
            "seconds": whole_s - result.perf_metrics.get_ttft().mean / 1000,
        }
        if settings["drafter"]:
            metrics = result.extended_perf_metrics
            answer["num_accepted"] = metrics.get_num_accepted_tokens()
            answer["num_steps"] = (
                len(metrics.main_model_metrics.raw_metrics.m_durations) - 1
            )  # without prefill
        return answer

    return f"openvino-genai {_version('openvino-genai')}", decode


def _exported(source: str, place: Path, *, is_drafter: bool) -> str:
    """Returns the folder of an exported model, made offline where it is missing."""
    if not (place / "openvino_model.xml").exists():
        words = ["export", "openvino", "--model", source, "--task", "text-generation-with-past"]
        words += ["--weight-format", "fp32"]
        words += ["--trust-remote-code", "--disable-convert-tokenizer"] if is_drafter else []
        os.environ["HF_HUB_OFFLINE"] = "1"
        program = Path(sys.executable).with_name("optimum-cli")
        subprocess.run([str(program), *words, str(place)], stdout=sys.stderr, check=True)
    return str(place)


def open_llama(settings: dict[str, Any]) -> tuple[str, Decode]:
    """Returns llama.cpp's name, by its Python binding, and how it decodes a GGUF plainly."""
    llama_cpp = importlib.import_module("llama_cpp")
    gguf = settings["options"]["gguf"]
    if gguf is None:
        raise ValueError("no model; hint: --gguf FILE")
    model = llama_cpp.Llama(
        gguf,
        n_ctx=settings["max_positions"],
        n_threads=settings["num_threads"],
        n_threads_batch=settings["num_threads"],
        verbose=False,
    )

    def decode(prompt: list[int], max_new_tokens: int) -> Answer:
        model.reset()
        ids: list[int] = []
        times: list[float] = []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            ids.append(token)
            times.append(time.perf_counter())
            if len(ids) == max_new_tokens or token in settings["eos_token_ids"]:
                break
        return {"ids": ids, "seconds": times[-1] - times[0]}

    return f"llama.cpp (llama-cpp-python {_version('llama-cpp-python')})", decode


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except ImportError:  # PackageNotFoundError is one
            continue
    return "of unknown version"


OPENERS = {"vllm": open_vllm, "openvino": open_openvino, "llama": open_llama}


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what engines print goes to the log

    def say(answer: Answer) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    settings = json.loads(sys.stdin.readline())
    os.environ["OMP_NUM_THREADS"] = str(settings["num_threads"])  # before any library reads it
    try:
        engine, decode = OPENERS[sys.argv[1]](settings)
    except Exception as error:  # whatever another project's code raises is the reason
        say({"error": f"{type(error).__name__}: {error}"})
        raise
    say({"engine": engine})
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        answer = decode(request["prompt"], request["max_new_tokens"])
        say({**answer, "whole_s": time.perf_counter() - started})


if __name__ == "__main__":
    main()
