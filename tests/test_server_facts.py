"""`bench.arms.counters` and `bench.arms.identity`: what servers count, and what they say they are."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.bench.arms.base import ArmError
from paceline.bench.arms.counters import difference, parse_counters, read_counters
from paceline.bench.arms.endpoint import Endpoint, ServerError
from paceline.bench.arms.identity import describe, llama_facts, sglang_facts, split_flags
from paceline.bench.arms.server import server_arm
from unruly_server import NUM_PROMPT_TOKENS, UnrulyServer, running


@pytest.fixture
def server() -> Iterator[UnrulyServer]:
    with running(UnrulyServer()) as started:
        yield started


# Counters ------------------------------------------------------------------------------------------------------------


VLLM = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a\\"b"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.4e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 3
"""
LLAMA = """\
# HELP llamacpp:spec_decode_num_drafts_total Number of verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 12
llamacpp:spec_decode_num_draft_tokens_total 36
llamacpp:spec_decode_num_accepted_tokens_total 14
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 10
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 4
llamacpp:tokens_predicted_total 99
"""
SGLANG_PAGE = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{tp_rank="0"} 2.5
sglang:spec_verify_calls_total{engine_type="unified"} 12.0
sglang:generation_tokens_total{model_name="m"} 99.0
"""
TRTLLM = """\
# TYPE trtllm_spec_decode_num_draft_tokens_total counter
trtllm_spec_decode_num_draft_tokens_total{engine_type="trtllm"} 36.0
trtllm_spec_decode_num_draft_tokens_created{engine_type="trtllm"} 1.7e+09
trtllm_spec_decode_num_accepted_tokens_total{engine_type="trtllm"} 14.0
trtllm_spec_decode_acceptance_length{engine_type="trtllm"} 2.1
"""
TRTLLM_SLOTS = TRTLLM + "".join(
    f'trtllm_spec_decode_{kind}_tokens_total{{token_position="{slot}",worker="0"}} {count}\n'
    for kind, counts in (("drafted", (11, 11, 11)), ("accepted", (9, 3, 0)))
    for slot, count in enumerate(counts)
)
ALL = {"num_steps": 12, "num_drafted": 36, "num_accepted": 14, "accepted_0": 10, "accepted_1": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM, ALL),
        (LLAMA, ALL),
        (SGLANG_PAGE, {"num_steps": 12}),
        (TRTLLM, {"num_drafted": 36, "num_accepted": 14}),
        (
            TRTLLM_SLOTS,
            {
                "num_steps": 11,
                "num_drafted": 33,
                "num_accepted": 12,
                "accepted_0": 9,
                "accepted_1": 3,
                "accepted_2": 0,
            },
        ),
        ("process_cpu_seconds_total 3\n", {}),
    ],
    ids=["vllm", "llama.cpp", "sglang", "trtllm", "trtllm by slot", "other"],
)
def test_counters_of_four_engines(text: str, expected: dict[str, float]) -> None:
    counters = parse_counters(text)
    assert counters == expected
    later = {name: value + 3 for name, value in counters.items()}
    assert difference(counters, later) == dict.fromkeys(expected, 3.0)
    assert difference({}, counters) == (counters if expected else {})
    assert difference(counters, counters) == difference(None, counters) == difference(counters, None) == {}
    if expected:
        with pytest.raises(
            ServerError, match=r"the counter \w+ went from \d+ to \d+: the server was started again"
        ):
            difference(later, counters)
        with pytest.raises(ServerError, match=r"went from \d+ to 0"):
            difference(later, {})


def test_where_counters_are(server: UnrulyServer) -> None:
    endpoint = Endpoint(server.url)
    assert read_counters(endpoint) == {"num_steps": 0, "num_drafted": 0, "num_accepted": 0}
    server.counts = None
    assert read_counters(endpoint) is None
    server.pages |= {"/metrics": [{"iter": 1}], "/prometheus/metrics": TRTLLM}  # as TensorRT-LLM has them
    assert read_counters(endpoint) == {"num_drafted": 36, "num_accepted": 14}
    server.pages["/metrics"] = "vllm:spec_decode_num_drafts_total many\n"
    with pytest.raises(ServerError, match="expected Prometheus text, got vllm:"):
        read_counters(endpoint)


# What is known of a server -------------------------------------------------------------------------------------------


def test_a_server_says_what_it_is(server: UnrulyServer) -> None:
    server.pages |= {
        "/v1/models": {
            "data": [{"id": "x"}, {"id": "m", "root": "org/m", "owned_by": "vllm", "max_model_len": 1024}]
        },
        "/version": {"version": "0.32.0"},
    }
    options = {"url": server.url, "model": "m"}
    fingerprint = server_arm("arm", "url", options).open()
    assert fingerprint.basis == {
        "server": "vllm",
        "model": "org/m",
        "max_model_len": "1024",
        "version": "0.32.0",
        "probe_prompt_tokens": str(NUM_PROMPT_TOKENS),
    }
    assert fingerprint.speculation == {} and server.bodies[-1]["max_tokens"] == 1
    server.pages["/v1/models"] = {"data": []}
    with pytest.raises(ArmError, match="expected an object with a list of 'data'"):
        server_arm("arm", "url", {"url": server.url}).open()
    with pytest.raises(
        ServerError, match=r"expected a chat completion with usage\.prompt_tokens, got .*Not Found"
    ):
        server.pages["/v1/models"] = {}
        describe(_Other(server.url), "m", {})


class _Other(Endpoint):
    """An address whose chat completions are something else."""

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return {"detail": "Not Found"}


def test_facts_of_llama_cpp_and_sglang() -> None:
    params = {"top_k": 40, "samplers": ["top_k"], "speculative.n_max": 7}
    props = {
        "build_info": "b11434",
        "model_path": "/m.gguf",
        "total_slots": 4,
        "chat_template": "{{ x }}",
        "default_generation_settings": {"n_ctx": 1024, "is_processing": True, "params": params},
    }
    basis, speculation = llama_facts(props)
    assert (
        speculation == {"speculative.n_max": "7"}
        and basis["version"] == "b11434"
        and basis["n_ctx"] == "1024"
    )
    assert basis["default top_k"] == "40" and basis["default samplers"] == '["top_k"]' and len(basis) == 7
    assert llama_facts({}) == sglang_facts({}) == ({}, {})
    info = {"version": "0.5.23", "model_path": "org/m", "tp_size": 1, "nccl_port": 12345, "random_seed": 9}
    basis, speculation = sglang_facts(
        info | {"speculative_algorithm": "DFLASH", "speculative_num_steps": None}
    )
    assert basis == {"version": "0.5.23", "model_path": "org/m", "tp_size": "1"}
    assert speculation == {"speculative_algorithm": "DFLASH"}


@pytest.mark.parametrize(
    ("command", "basis", "speculation"),
    [
        (
            "python -m vllm.entrypoints.openai.api_server --model T --dtype float32 --enforce_eager --port 8000 "
            """--speculative-config '{"method": "dflash"}' --api-key secret --logprobs-mode raw --log-level=debug""",
            {"command": "python", "-m": "vllm.entrypoints.openai.api_server", "--model": "T", "--dtype": "float32",
             "--enforce-eager": "", "--logprobs-mode": "raw"},
            {"--speculative-config": '{"method": "dflash"}'},
        ),
        (
            "llama-server -m t.gguf -md d.gguf --spec-type draft-dflash --draft-max 7 -c 1024 -t 2 --temp -1 --host 0",
            {"command": "llama-server", "-m": "t.gguf", "-c": "1024", "-t": "2", "--temp": "-1"},
            {"-md": "d.gguf", "--spec-type": "draft-dflash", "--draft-max": "7"},
        ),
        (
            "env A=1 sglang serve --model-path=T --speculative-algorithm DFLASH --stop a --stop b",
            {"command": "env A=1 sglang serve", "--model-path": "T", "--stop": "a b"},
            {"--speculative-algorithm": "DFLASH"},
        ),
    ],
)  # fmt: skip
def test_flags_are_put_on_their_side(
    command: str, basis: dict[str, str], speculation: dict[str, str]
) -> None:
    assert split_flags(shlex.split(command)) == (basis, speculation)
