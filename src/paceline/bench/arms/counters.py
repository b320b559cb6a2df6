"""Acceptance as servers tell it: of one answer, in its stream, and of all together, as counters on a metrics page.

Only what is exact is taken. A mean over a server's life, an interval's gauge, or totals of an answer without its steps
say nothing certain about a request or a pass; they are left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from time import perf_counter, sleep
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from paceline.bench.arms.endpoint import Endpoint, LostConnectionError, ServerError, brief

Acceptance = tuple[tuple[int, int, int], ...]
"""Verify steps as in `Outcome.acceptance`: (num_drafted, num_accepted, how many such steps)."""

PAGES = ("/metrics", "/prometheus/metrics")
"""Where counters are: TensorRT-LLM has its own JSON at the first and the text at the second."""

TOTALS = {
    "vllm:spec_decode_num_drafts_total": "num_steps",
    "vllm:spec_decode_num_draft_tokens_total": "num_drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted",
    "llamacpp:spec_decode_num_drafts_total": "num_steps",
    "llamacpp:spec_decode_num_draft_tokens_total": "num_drafted",
    "llamacpp:spec_decode_num_accepted_tokens_total": "num_accepted",
    "sglang:spec_verify_calls_total": "num_steps",  # its acceptance is a gauge
    "trtllm_spec_decode_num_draft_tokens_total": "num_drafted",
    "trtllm_spec_decode_num_accepted_tokens_total": "num_accepted",
}
SLOTS = {
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("accepted", "position"),
    "llamacpp:spec_decode_num_accepted_tokens_per_pos_total": ("accepted", "position"),
    "trtllm_spec_decode_accepted_tokens_total": ("accepted", "token_position"),
    "trtllm_spec_decode_drafted_tokens_total": ("drafted", "token_position"),
}
"""Counters by slot: what they count, and the label that holds the slot, from 0."""

_SETTLED_S, _UNSETTLED_S = 0.1, 1.0


def read_counters(endpoint: Endpoint) -> dict[str, float] | None:
    """Returns what a server has counted since it started, by the names of `Passed.counters`; labels are summed.

    `None` where it has no page of metrics (llama.cpp needs `--metrics`, SGLang `--enable-metrics`).

    Raises:
        LostConnectionError: see `LostConnectionError`.
        ServerError: the page cannot be read as Prometheus text.
    """
    for page in PAGES:
        try:
            content = endpoint.read(page).decode("utf-8", "replace")
        except LostConnectionError:
            raise
        except ServerError:
            continue
        if content.lstrip()[:1] not in ("[", "{"):
            return parse_counters(content)
    return None


def parse_counters(text: str) -> dict[str, float]:
    """Returns the counters of a metrics page's text; pure.

    Raises:
        ServerError: it is no Prometheus text.
    """
    totals: Counter[str] = Counter()
    slots: dict[str, Counter[int]] = {"accepted": Counter(), "drafted": Counter()}
    try:
        for sample in _samples(text):
            if sample.name in TOTALS:
                totals[TOTALS[sample.name]] += sample.value  # type: ignore[assignment]  # a Counter takes floats
            else:
                kind, label = SLOTS[sample.name]
                slots[kind][int(sample.labels[label])] += sample.value  # type: ignore[assignment]
    except (ValueError, KeyError) as error:
        raise ServerError(f"expected Prometheus text, got {brief(text)} ({error})") from error
    counters = {name: float(value) for name, value in totals.items()}
    if drafted := slots["drafted"]:  # then these alone, since the totals are counted elsewhere
        # every step drafts its first slot
        counters["num_steps"], counters["num_drafted"] = float(drafted[0]), float(sum(drafted.values()))
        counters["num_accepted"] = float(sum(slots["accepted"].values()))
    return counters | {f"accepted_{slot}": float(n) for slot, n in sorted(slots["accepted"].items())}


def settled_counters(endpoint: Endpoint) -> dict[str, float] | None:
    """Returns the counters once they stand still: servers count the last step a moment after they have answered.

    After a second they are taken as they are. Raises like `read_counters`.
    """
    deadline = perf_counter() + _UNSETTLED_S
    counters = read_counters(endpoint)
    while counters and perf_counter() < deadline:
        sleep(_SETTLED_S)
        earlier, counters = counters, read_counters(endpoint)
        if counters == earlier:
            break
    return counters


def difference(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> dict[str, float]:
    """Returns what was counted in between; empty where nothing was, or where one of the two is missing. Pure.

    Raises:
        ServerError: a counter went back, as it does when a server is started again.
    """
    if before is None or after is None:
        return {}
    for name, value in before.items():
        if after.get(name, 0.0) < value:
            raise ServerError(
                f"the counter {name} went from {value:g} to {after.get(name, 0.0):g}: the server was started again"
            )
    counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return counted if any(counted.values()) else {}


def acceptance_in(event: Mapping[str, Any]) -> Acceptance | None:
    """Returns the verify steps that one JSON object of an answer tells, `None` where it tells none exactly. Pure.

    vLLM with `--per-request-spec-decode-metrics`: `metrics.speculative_decoding`. SGLang where the request holds
    `"return_spec_tokens_details": true`: `sglext.spec_tokens_details`. llama.cpp's `timings` have no steps.
    """
    vllm = _inner(event, "metrics", "speculative_decoding")
    if "per_step_drafted" in vllm:
        drafted, accepted = _counts(vllm["per_step_drafted"]), _counts(vllm.get("per_step_accepted"))
        if drafted is None or accepted is None or len(drafted) != len(accepted):
            return None
        steps = Counter(zip(drafted, accepted, strict=True))
        return tuple((*step, count) for step, count in sorted(steps.items()))
    if "acceptance_histogram" in vllm:
        return _from_histogram(
            vllm["acceptance_histogram"], vllm.get("num_draft_tokens"), vllm.get("num_spec_tokens")
        )
    sglang = _inner(event, "sglext", "spec_tokens_details")
    if "spec_correct_drafts_histogram" in sglang:
        return _from_histogram(
            sglang["spec_correct_drafts_histogram"], sglang.get("spec_num_proposed_drafts"), None
        )
    return None


def _from_histogram(histogram: object, num_drafted: object, drafted_per_step: object) -> Acceptance | None:
    """Returns the steps behind a histogram of accepted drafts, if all of them drafted the same number.

    Args:
        histogram: how many steps accepted 0, 1, … drafts.
        num_drafted: of all steps together.
        drafted_per_step: as the server is set; `None` is whatever divides evenly.
    """
    counts = _counts(histogram)
    if counts is None or type(num_drafted) is not int:
        return None
    if not any(counts):
        return ()
    if drafted_per_step is None:
        drafted_per_step = num_drafted // sum(counts)
    if type(drafted_per_step) is not int or drafted_per_step * sum(counts) != num_drafted:
        return None
    steps = tuple((drafted_per_step, accepted, n) for accepted, n in enumerate(counts) if n)
    return steps if all(accepted <= drafted for drafted, accepted, _ in steps) else None


def _counts(value: object) -> list[int] | None:
    if not isinstance(value, list) or not all(type(count) is int and count >= 0 for count in value):
        return None
    return value


def _inner(event: Mapping[str, Any], outer: str, inner: str) -> Mapping[str, Any]:
    holder = event.get(outer)
    value = holder.get(inner) if isinstance(holder, dict) else None
    return value if isinstance(value, dict) else {}


def _samples(text: str) -> Iterator[Sample]:
    """Yields the samples that are of use; the other lines, thousands of histogram buckets, are not parsed."""
    wanted = [line for line in text.splitlines() if line.partition("{")[0].split(" ")[0] in TOTALS | SLOTS]
    for family in text_string_to_metric_families("\n".join(wanted) + "\n"):
        yield from family.samples
