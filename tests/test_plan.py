"""Plans of benchmarks: what a file and the command line may say, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.arms.assembly import ARM_KINDS, assemble, needs_pair
from paceline.bench.arms.base import Load
from paceline.bench.runs.plan import ArmSpec, LatencyTarget, Plan, Rules
from paceline.core.errors import ConfigError

PLANS = Path(__file__).resolve().parent.parent / "benchmarks" / "plans"

WHOLE = """
loads = [{ concurrency = 2 }, { rate_per_s = 0.5 }, { speed = 2 }]
temperatures = [0, 0.8]
max_new_tokens = 32
num_blocks = 4
may_differ = ["engine"]
[[arms]]
name = "off"
kind = "plain"
[[arms]]
name = "on"
kind = "url"
options = { url = "http://127.0.0.1:1", timeout_s = 3, api_key = "secret" }
[rules]
min_speedup = 1.2
latency = { ttft_s = 0.5, attainment = 0.9 }
"""


def test_a_file_says_everything(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(WHOLE)
    plan = Plan.from_toml(path)
    assert plan.loads == (Load(2), Load(rate_per_s=0.5), Load(speed=2.0))
    assert plan.temperatures == (0.0, 0.8) and plan.may_differ == ("engine",)
    assert plan.arms[1].options == {"url": "http://127.0.0.1:1", "timeout_s": 3, "api_key": "secret"}
    assert plan.rules == Rules(min_speedup=1.2, latency=LatencyTarget(ttft_s=0.5, attainment=0.9))
    assert (plan.baseline, plan.control) == ("off", "off again")


def test_a_stored_plan_is_the_plan_without_its_secrets(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(WHOLE)
    stored = json.dumps(Plan.from_toml(path).to_dict())
    assert "secret" not in stored
    path.write_text(WHOLE.replace(', api_key = "secret"', ""))
    assert Plan.from_dict(json.loads(stored)) == Plan.from_toml(path)


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.toml")), ids=lambda path: path.stem)
def test_our_own_plans_can_be_read(path: Path) -> None:
    plan = Plan.from_toml(path)
    assert len(plan.arms) > 1 and all(arm.kind in ARM_KINDS for arm in plan.arms)


ARMS = '[[arms]]\nname = "a"\nkind = "plain"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("arms = [", "not TOML"),
        ("", r"missing \['arms'\]"),
        ("blocks = 3\n" + ARMS, r"unknown keys \['blocks'\]; expected some of"),
        ("num_blocks = 0\n" + ARMS, "plan.num_blocks: expected at least 1, got 0"),
        ("num_starts = 9\n" + ARMS, "plan.num_starts: expected 1…6, got 9"),
        ("temperatures = [101]\n" + ARMS, "temperatures: expected 0…100"),
        ("temperatures = []\n" + ARMS, "temperatures: expected at least one"),
        ("loads = [{concurrency = 1, rate_per_s = 1}]\n" + ARMS, "expected one of concurrency"),
        ("loads = [{}]\n" + ARMS, "expected one of concurrency"),
        (
            "loads = [{concurrency = 1}, {concurrency = 1}]\n" + ARMS,
            "loads: expected at least one, each once",
        ),
        ("loads = [{rate_per_s = -1}]\n" + ARMS, "above 0"),
        (ARMS + ARMS, "each with a name of its own"),
        (ARMS + '[[arms]]\nname = "a again"\nkind = "plain"\n', "name of the A/A control"),
        (
            ARMS + "options = { block_size = [1] }\n",
            r"arms\[0\].options: expected a table of texts and numbers",
        ),
        (ARMS + "[rules]\nworst_kind = 1.2\n", "worst_kind: expected at most min_speedup"),
        (ARMS + "[rules]\nconfidence = 95\n", "rules.confidence: expected 0.5…0.9999, got 95"),
        (ARMS + "[rules.latency]\nttft_s = -1\n", "rules.latency.ttft_s"),
    ],
)
def test_a_wrong_plan_is_named(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        Plan.from_toml(path)


def test_a_word_is_an_arm() -> None:
    assert ArmSpec.parse("plain") == ArmSpec("plain", "plain")
    assert ArmSpec.parse("dflash,block_size=4,tree_nodes=0") == ArmSpec(
        "dflash block_size=4 tree_nodes=0", "dflash", {"block_size": 4, "tree_nodes": 0}
    )
    assert ArmSpec.parse("url,url=http://h:1/v1,name=on") == ArmSpec("on", "url", {"url": "http://h:1/v1"})
    with pytest.raises(ConfigError, match="expected KIND,key=value"):
        ArmSpec.parse("dflash,4")


def test_servers_need_no_pair() -> None:
    servers = Plan((ArmSpec("a", "url", {"url": "http://127.0.0.1:1"}),))
    assert not needs_pair(servers)

    def never() -> None:
        raise AssertionError("the pair was loaded")

    (arm,) = assemble(servers, never)  # type: ignore[arg-type]  # it must not be called
    assert arm.name == "a"
    with pytest.raises(ConfigError, match=r"arm 'x': expected one of plain, dflash.* got 'vllm'"):
        assemble(Plan((ArmSpec("x", "vllm"),)), never)  # type: ignore[arg-type]
