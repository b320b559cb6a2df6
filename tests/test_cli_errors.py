"""What goes wrong on the command line: one clear line, the right exit code, never a traceback."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_runs import ENVIRONMENT, one_target, run, save_drafter
from paceline.cli import train
from paceline.cli.chat import Conversation
from paceline.cli.decoding import complete
from paceline.cli.output import Transcript
from paceline.core.params import SamplingParams
from paceline.core.types import TokenDelta
from paceline.llm import LLM
from paceline.train.run import TrainEvent
from test_cli import RECIPE


@pytest.fixture(autouse=True, scope="module")
def _one_target() -> Iterator[None]:
    with one_target():
        yield


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def _ctrl_c_arrives() -> Iterator[None]:
    """Whoever started the tests may have told them to ignore it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="module")
def llm(_one_target: None) -> LLM:
    return LLM(drafter=None)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafters") / "random")


# Wrong usage


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nope"], "nope"),
        (["generate"], "prompt"),
        (["generate", "x", "--bogus"], "--bogus"),
        (["generate", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "x", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["generate", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "x", "--block-size", "0"], "--block-size"),
        (["generate", "x", "--seed", "-1"], "--seed"),
        (["generate", "x", "--seed", str(2**63)], "--seed"),
        (["generate", "x", "--n", "0"], "--n"),
        (["generate", "x", "--n", "2"], "--n: expected 1 at temperature 0"),
        (["chat", "--n", "2"], "no such option: --n"),
        (["generate", "x", "--temperature", "nan"], "--temperature"),
        (["generate", "x", "--top-k", "-1"], "--top-k"),
        (["generate", "x", "--top-p", "0"], "--top-p"),
        (["generate", "x", "--min-p", "1.5"], "--min-p"),
        (["generate", "x", "--repetition-penalty", "0"], "--repetition-penalty"),
        (["generate", "x", "--presence-penalty", "3"], "--presence-penalty"),
        (["generate", "x", "--frequency-penalty", "-3"], "--frequency-penalty"),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias"),
        (["generate", "x", "--logit-bias", "a=1"], "--logit-bias"),
        (["generate", "x", "--logit-bias", "1=101"], "--logit-bias"),
        (["generate", "x", "--logit-bias", "1=1", "--logit-bias", "1=2"], "--logit-bias"),
        (["generate", "x", "--bad-word", ""], "--bad-word"),
        (["generate", "x", "--allowed-token-id", "-1"], "--allowed-token-id"),
        (["generate", "x", "--stop", ""], "--stop"),
        (["generate", "x", "--stop-token-id", "-1"], "--stop-token-id"),
        (["generate", "x", "--min-new-tokens", "300"], "--min-new-tokens"),
        (["generate", "x", "--logprobs", "2"], "--logprobs: needs --json"),
        (["generate", "x", "--logprobs", "21", "--json"], "--logprobs"),
        (["generate", "x", "--logprobs-mode", "cooked"], "--logprobs-mode"),
        (["generate", "x", "--logprobs-mode", "processed"], "--logprobs-mode"),
        (["generate", "x", "--json-schema", "{"], "--json-schema"),
        (["generate", "x", "--regex", ""], "--regex"),
        (["generate", "x", "--regex", "a", "--json-schema", "{}"], "expected one grammar, got 2"),
        (["generate", "x", "--regex", "a", "--bad-word", "b"], "cannot be kept together with bad_words"),
        (["generate", "x", "--stream", "--json"], "--stream"),
        (["generate", "x", "--stream", "--n", "2", "--temperature", "1"], "--stream"),
        (["chat", "--temperature", "1e9"], "--temperature"),
        (["demo", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["demo", "--temperature", "1"], "--temperature"),
        (["demo", "--drafter", "none"], "--drafter"),
    ],
)
def test_wrong_usage_is_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("paceline.llm.LLM")  # nothing is loaded
    done = run(capsys, *arguments)
    assert (done.code, done.out) == (2, "")
    assert named in done.err.lower()


# Errors of ours, found before anything is loaded


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--target", "smollm2-135m-instruc"], "did you mean 'smollm2-135m-instruct'?"),
        (["generate", ""], "prompt: expected some text"),
        (["generate", "x", "--device", "gpu"], "device: expected auto"),
        (["generate", "x", "--dtype", "int8"], "dtype: expected auto"),
        (["demo", "--target", "org/model"], "none ships for target 'org/model'; hint: "),
        (["demo", "--prompts", "missing.jsonl"], "missing.jsonl: No such file"),
        (["generate", "x", "--json-schema", "missing.json"], "missing.json: No such file"),
        (["chat", "--grammar", "missing.lark"], "missing.lark: No such file"),
        (["inspect", "missing"], "target 'missing': expected"),
        (["inspect", "missing", "--pair", "x"], "missing: expected a drafter folder"),
        (["train", "missing.toml"], "recipe missing.toml: cannot be read"),
    ],
)
def test_errors_are_1_and_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(capsys, *arguments)
    assert (done.code, done.out) == (1, "")
    assert said in done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "a", "kind": "b"}', "p.jsonl:1: expected an object with exactly"),
        ('{"id": 1, "kind": "b", "prompt": "c"}', "p.jsonl:1: expected an object with exactly"),
        ("\n[", "p.jsonl:2: not JSON"),
        ("", "p.jsonl: expected at least one prompt"),
    ],
)
def test_demo_names_the_bad_line(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text(line, encoding="utf-8")
    done = run(capsys, "demo", "--prompts", tmp_path / "p.jsonl")
    assert done.code == 1 and said in done.err


def test_stdin_that_is_not_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    done = run(capsys, "generate", "-")
    assert done.code == 1 and "stdin is not UTF-8 text (byte 2)" in done.err


def test_grammar_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "g.lark").write_bytes(b"start: \xff")
    done = run(capsys, "generate", "x", "--grammar", tmp_path / "g.lark")
    assert done.code == 1 and "g.lark: expected UTF-8 text, got other bytes at 7" in done.err


# Errors of ours, found with the target at hand


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--stop-token-id", "99999"], "stop_token_ids: token ids must be in 0…49151, got 99999"),
        (["--regex", "("], "grammar: regex: "),
    ],
)
@pytest.mark.parametrize("command", ["generate -", "chat"])
def test_what_the_target_cannot_do(
    command: str,
    flags: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi\nHo\n"), encoding="utf-8"))
    done = run(capsys, *command.split(), "--drafter", "none", *flags)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {said}") and done.err.count("\n") == 1


def test_drafter_for_another_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save_drafter(tmp_path / "other", hidden_size=64)
    done = run(capsys, "generate", "x", "--drafter", other)
    assert done.code == 1
    assert "hidden_size: drafter 64, target 576" in done.err and "hint:" in done.err


@pytest.mark.parametrize("num_bytes", [0, 100, 500_000])
def test_truncated_drafter(num_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = save_drafter(tmp_path / "cut") / "model.safetensors"
    os.truncate(weights, num_bytes)
    done = run(capsys, "generate", "x", "--drafter", tmp_path / "cut")
    assert (done.code, done.out) == (1, "")
    assert f"error: {weights}: not a whole safetensors file" in done.err


def test_drafter_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(capsys, "generate", "x", "--drafter", tmp_path)
    assert done.code == 1 and "expected a drafter folder" in done.err


def test_block_size_beyond_the_drafter(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(capsys, "generate", "x", "--drafter", drafter, "--block-size", 9)
    assert done.code == 1 and "block_size: expected 1…4" in done.err


def test_prompt_longer_than_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    done = run(capsys, "generate", "word " * 9000, "--drafter", "none")
    assert (done.code, done.out) == (1, "")
    assert "exceed the 8192 positions" in done.err and "hint: shorten either" in done.err


def test_chat_goes_on_after_a_line_that_is_too_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"{'word ' * 9000}\nHi\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
    done = run(capsys, "chat", "--drafter", "none", "--max-new-tokens", 2, "--json")
    assert done.code == 1 and "or /reset" in done.err
    assert json.loads(done.out)["num_new_tokens"] == 2


# Output that nobody takes


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(
    drafter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open("/dev/full", "w", encoding="utf-8")  # noqa: PTH123, SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    done = run(capsys, "inspect", drafter)
    sys.stdout.close()
    with pytest.raises(OSError, match="No space left"):
        stream.close()
    assert done.code == 1
    assert done.err == "error: No space left on device; hint: make room, then run again\n"


def test_reader_that_left(
    drafter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    done = run(capsys, "inspect", drafter)
    sys.stdout.close()
    with pytest.raises(BrokenPipeError):
        stream.close()
    assert (done.code, done.err) == (1, "")


# Ctrl-C


@pytest.mark.usefixtures("_ctrl_c_arrives")
def test_ctrl_c_ends_an_answer_between_steps(llm: LLM) -> None:
    seen: list[TokenDelta] = []

    def show(delta: TokenDelta) -> None:
        if not seen:  # a second one would not wait for the step
            signal.raise_signal(signal.SIGINT)
        seen.append(delta)

    params = SamplingParams(max_new_tokens=50)
    completion = complete(llm, llm.render("Hi"), params, show=show)
    assert completion.finish_reason == "cancelled"
    assert completion.token_ids == tuple(token for delta in seen for token in delta.token_ids)
    with pytest.raises(KeyboardInterrupt):  # afterwards Ctrl-C is what it was
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("_ctrl_c_arrives")
def test_chat_keeps_what_was_said_before_ctrl_c(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show, shown = Transcript.show, list[TokenDelta]()

    def interrupted(transcript: Transcript, delta: TokenDelta) -> None:
        shown.append(delta)
        show(transcript, delta)
        if len(shown) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Transcript, "show", interrupted)
    params = SamplingParams(max_new_tokens=8)
    conversation = Conversation(llm, params, None, drafter="none", as_json=False)
    assert conversation.take("Tell me a story.") and conversation.take("Go on.")
    stopped, whole = conversation.completions
    assert (stopped.finish_reason, whole.finish_reason) == ("cancelled", "length")
    assert conversation.messages[1] == {"role": "assistant", "content": stopped.text}
    assert capsys.readouterr().out == f"{stopped.text}\n{whole.text}\n"


@pytest.mark.usefixtures("_ctrl_c_arrives")
def test_train_saves_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = train.describe

    def interrupted(event: TrainEvent, num_tokens: int) -> str:
        if event.stage == "train" and event.done == 1:
            signal.raise_signal(signal.SIGINT)
        return describe(event, num_tokens)

    (tmp_path / "r.toml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n', encoding="utf-8")
    arguments = (
        "train",
        tmp_path / "r.toml",
        "--out",
        tmp_path / "run",
        "--data",
        tmp_path / "p.jsonl",
        "--json",
    )
    with monkeypatch.context() as patch:
        patch.setattr(train, "describe", interrupted)
        done = run(capsys, *arguments)
    document = json.loads(done.out)
    assert (done.code, document["finished"], document["step"]) == (130, False, 1)
    assert "the same command goes on" in done.err
    assert json.loads(run(capsys, *arguments).out)["step"] == 2


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_in_a_real_process() -> None:
    command = [sys.executable, "-m", "paceline", "generate", "Tell me a long story.", "--drafter", "none"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        assert process.stdout is not None
        begun = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert begun
    assert process.returncode == 130, err
    assert b"error: interrupted" in err and b"Traceback" not in err
