"""What is known of a server: what it says of itself, and what its command line says.

Of two servers that are compared everything must be equal but speculation; so each fact is put on one of these sides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.arms.endpoint import Endpoint, LostConnectionError, ServerError, brief

Sides = tuple[dict[str, str], dict[str, str]]
"""Facts that belong to the basis and facts that belong to speculation."""

SPECULATION_FLAGS = (
    # vLLM and SGLang
    "--speculative",
    "-sc",
    # llama.cpp
    "--spec-",
    "--draft",
    "--model-draft",
    "-md",
    "--hf-repo-draft",
    "-hfd",
    "-hfrd",
    "--ctx-size-draft",
    "-cd",
    "--device-draft",
    "-devd",
    "--gpu-layers-draft",
    "--n-gpu-layers-draft",
    "-ngld",
    "--threads-draft",
    "--threads-batch-draft",
    "-td",
    "-tbd",
    "--cache-type-k-draft",
    "--cache-type-v-draft",
    "-ctkd",
    "-ctvd",
    "--lookup-cache",
    "-lcs",
    "-lcd",
)
IGNORED_FLAGS = (
    # where it listens, who may ask, what it is called
    "--host",
    "--port",
    "--uds",
    "--ssl-",
    "--api-key",
    "--hf-token",
    "-hft",
    "--root-path",
    "--served-model-name",
    "--alias",
    "-a",
    # what it notes
    "--log-",
    "-lv",
    "--verbose",
    "-v",
    "--disable-log",
    "--enable-log",
    "--no-enable-log",
    "--uvicorn-log",
    "--metrics",
    "--enable-metrics",
    "--per-request-spec-decode-metrics",
)
"""Long flags are meant with whatever follows in their name, short ones as they stand."""

SGLANG_FACTS = (
    "model_path",
    "tokenizer_path",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "device",
    "tp_size",
    "dp_size",
    "pp_size",
    "ep_size",
    "attention_backend",
    "sampling_backend",
    "chunked_prefill_size",
    "max_running_requests",
    "schedule_policy",
    "disable_radix_cache",
    "disable_cuda_graph",
    "enable_deterministic_inference",
)
"""Settings out of the many that SGLang lists; the rest names ports, seeds and sizes that vary from start to start."""

PROBE = "Count from one to ten, in words: one, two, …"
"""A message whose number of tokens tells tokenizers and chat templates apart."""


def describe(endpoint: Endpoint, model: str, entry: Mapping[str, Any]) -> Sides:
    """Returns what a server says of itself.

    Args:
        model: asked for the tokens of `PROBE`.
        entry: of the model, in the server's list of models.

    Raises:
        ServerError: it does not answer the probe.
    """
    basis = {
        name: str(value)
        for name, value in (
            ("server", entry.get("owned_by")),
            ("model", entry.get("root") or entry.get("id")),
            ("max_model_len", entry.get("max_model_len")),
            ("version", _asked(endpoint, "/version").get("version")),
        )
        if value is not None
    }
    basis["probe_prompt_tokens"] = _probe(endpoint, model)
    speculation: dict[str, str] = {}
    for more, more_speculation in (
        llama_facts(_asked(endpoint, "/props")),
        sglang_facts(_asked(endpoint, "/server_info") or _asked(endpoint, "/get_server_info")),
    ):
        basis |= more
        speculation |= more_speculation
    return basis, speculation


def llama_facts(props: Mapping[str, Any]) -> Sides:
    """Returns the facts in llama.cpp's `/props`: build, model, context, slots, template, default parameters. Pure."""
    settings = props.get("default_generation_settings")
    settings = settings if isinstance(settings, dict) else {}
    params = settings.get("params")
    params = params if isinstance(params, dict) else {}
    facts = {
        "version": props.get("build_info"),
        "model": props.get("model_path"),
        "n_ctx": settings.get("n_ctx"),
        "slots": props.get("total_slots"),
        "chat_template": props.get("chat_template") and _digest(props["chat_template"]),
        **{f"default {name}": value for name, value in sorted(params.items()) if not _speculates(name)},
    }
    return _texts(facts), _texts({name: value for name, value in params.items() if _speculates(name)})


def sglang_facts(info: Mapping[str, Any]) -> Sides:
    """Returns the facts in SGLang's server info; pure."""
    basis = {name: info.get(name) for name in ("version", *SGLANG_FACTS)}
    return _texts(basis), _texts({name: value for name, value in info.items() if _speculates(name)})


def split_flags(words: Sequence[str]) -> Sides:
    """Returns the facts in a command line, by flag; what stands before the first flag is "command". Pure.

    A flag's value is all that follows up to the next flag. `IGNORED_FLAGS` are left out, keys among them.
    """
    flags: dict[str, list[str]] = {"command": []}
    name = "command"
    for word in words:
        if _is_flag(word):
            name, has_value, value = word.partition("=")
            name = name.replace("_", "-")
            flags.setdefault(name, []).extend([value] if has_value else [])
        else:
            flags[name].append(word)
    kept = {name: " ".join(values) for name, values in flags.items() if not _named(name, IGNORED_FLAGS)}
    speculation = {name: value for name, value in kept.items() if _named(name, SPECULATION_FLAGS)}
    return {name: value for name, value in kept.items() if name not in speculation}, speculation


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit() and word not in ("-", "--")


def _named(name: str, flags: Sequence[str]) -> bool:
    return any(name.startswith(flag) if flag.startswith("--") else name == flag for flag in flags)


def _speculates(name: str) -> bool:
    return name.startswith("speculative")


def _probe(endpoint: Endpoint, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROBE}],
        "max_tokens": 1,
        "temperature": 0.0,
    }
    answer = endpoint.ask("/v1/chat/completions", body)
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if type(count) is not int:
        raise ServerError(
            f"{endpoint.url}: expected a chat completion with usage.prompt_tokens, got {brief(answer)}"
        )
    return str(count)


def _asked(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """Returns the JSON object at a path; empty where the server has none there."""
    try:
        answer = endpoint.ask(path)
    except LostConnectionError:
        raise
    except ServerError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the facts that are known, as text."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in facts.items()
        if value is not None
    }


def _digest(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()[:16]
