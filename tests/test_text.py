"""The default target's tokenizer: ids of chats and of text, and text that arrives token by token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import CheckpointError, ConfigError, RequestError
from paceline.target.pull import DEFAULT_TARGET, pull
from paceline.target.text import IncrementalDecoder, TextCodec, read_eos_token_ids, tokenizer_digest

VOCAB_SIZE = 49152
# "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face" between the chat marks 1 and 2
SYSTEM = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
SYSTEM += [19712, 8182, 2, 198]
TADPOLES = [
    68,
    1160,
    8041,
    216,
    33,
    40,
    32,
    40208,
    47485,
    965,
    1303,
    216,
    39,
    37,
    21,
    282,
    601,
    685,
    30,
    1073,
]
TADPOLES += [800, 1250, 384, 1446, 47]
MIXED = "Grüße 👩‍🚀 🏳️‍🌈, 東京 — ½ naïve\t\n  ไทย 🇩🇪 हिन्दी 🧑🏽‍🌾!"


@pytest.fixture(scope="module")
def folder() -> Path:
    return pull(DEFAULT_TARGET)


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec.load(folder)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("question", "ids"),
    [
        (
            "Where is the mgm park located in vegas?",
            [9576, 314, 260, 9209, 93, 5949, 3807, 281, 1590, 21149, 47],
        ),
        ("Trent caught 180 tadpoles then let 75% of them go. How many did he keep?", TADPOLES),
    ],
)
def test_chat_has_the_ids_the_model_knows(codec: TextCodec, question: str, ids: list[int]) -> None:
    assert codec.render_chat(user(question)) == [*SYSTEM, 1, 4093, 198, *ids, 2, 198, 1, 520, 9531, 198]


def test_own_system_message_replaces_the_default_one(codec: TextCodec) -> None:
    rendered = codec.decode(codec.render_chat([{"role": "system", "content": "Be brief."}, *user("Hi")]))
    assert rendered == "system\nBe brief.\nuser\nHi\nassistant\n"


def test_digits_stand_alone_as_in_training(codec: TextCodec) -> None:
    # Spaces before a digit stay together, and so does the fraction: the split that the vocabulary was trained with.
    pieces = [codec.decode([i]) for i in codec.encode("x =  42\n    7 ½")]
    assert pieces == ["x", " =", "  ", "4", "2", "\n    ", "7", " ", "½"]


@pytest.mark.parametrize(
    "text", ["", " two  spaces ", "don 't , clean . up", MIXED, "\x00\x7f", "<|im_end|x>"]
)
def test_plain_text_survives(codec: TextCodec, text: str) -> None:
    assert codec.decode(codec.encode(text)) == text


def test_encode_adds_nothing_and_decode_leaves_special_tokens_out(codec: TextCodec) -> None:
    assert codec.encode("hi") == [6004]
    assert codec.decode([1, 6004, 2]) == "hi"


def test_facts_of_the_folder(folder: Path, codec: TextCodec) -> None:
    assert codec.has_chat_template
    assert codec.eos_token_ids == read_eos_token_ids(folder) == (2,)
    assert codec.digest == tokenizer_digest(folder)
    assert len(codec.digest) == 64


MALFORMED: list[tuple[object, str]] = [
    ([], "at least one message"),
    ({"role": "user", "content": "x"}, "expected a list"),
    (["x"], r"messages\[0\]: expected exactly the keys role and content, got str"),
    ([{"role": "user"}], r"got \['role'\]"),
    ([{"role": "user", "content": "x", "name": "y"}], r"got \['content', 'name', 'role'\]"),
    ([*user("x"), {"role": "robot", "content": "x"}], r"messages\[1\].role: .* got 'robot'"),
    ([{"role": "user", "content": None}], "expected text, got NoneType"),
    ([{"role": "user", "content": "\ud83d"}], "half of a surrogate pair"),
]


@pytest.mark.parametrize(("messages", "said"), MALFORMED)
def test_malformed_messages_are_refused(codec: TextCodec, messages: list[dict[str, str]], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        codec.render_chat(messages)


def test_half_a_surrogate_pair_is_no_text(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="prompt: half of a surrogate pair at character 2"):
        codec.encode("ab\ud83d")


def copy_tokenizer(folder: Path, to: Path, **changes: object) -> Path:
    """Copies the tokenizer and sets (or, with `None`, removes) entries of its tokenizer_config.json."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(folder / name, to / name)
    config = json.loads((to / "tokenizer_config.json").read_text()) | changes
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (to / "tokenizer_config.json").write_text(text)
    return to


def test_without_a_template_there_is_no_chat(folder: Path, tmp_path: Path) -> None:
    codec = TextCodec.load(copy_tokenizer(folder, tmp_path, chat_template=None))
    assert not codec.has_chat_template
    with pytest.raises(ConfigError, match="no chat template"):
        codec.render_chat(user("Hi"))


def test_what_the_template_refuses_is_the_requests_fault(folder: Path, tmp_path: Path) -> None:
    picky = "{{ raise_exception('users only') if messages[0]['role'] != 'user' }}{{ messages[0]['content'] }}"
    codec = TextCodec.load(copy_tokenizer(folder, tmp_path, chat_template=picky))
    assert codec.decode(codec.render_chat(user("Hi"))) == "Hi"
    with pytest.raises(RequestError, match="users only"):
        codec.render_chat([{"role": "system", "content": "x"}])


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"found no tokenizer; hint: put the model's tokenizer.json"):
        TextCodec.load(tmp_path)
    assert tokenizer_digest(tmp_path) == ""
    for content in ("{", '{"model": {}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"its tokenizer cannot be loaded \("):
            TextCodec.load(tmp_path)


def test_ends_of_text_are_the_union_of_what_the_files_say(folder: Path, tmp_path: Path) -> None:
    copy_tokenizer(folder, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 5}')
    assert read_eos_token_ids(tmp_path) == TextCodec.load(tmp_path).eos_token_ids == (2, 5, 7)
    copy_tokenizer(folder, tmp_path, eos_token={"content": "<|endoftext|>", "lstrip": False})
    assert read_eos_token_ids(tmp_path) == (0, 2)
    (tmp_path / "tokenizer.json").unlink()
    assert read_eos_token_ids(tmp_path) == (2,)


def test_digest_follows_the_ids_and_not_the_spelling(folder: Path, tmp_path: Path) -> None:
    file = copy_tokenizer(folder, tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["model"]["vocab"] = dict(sorted(content["model"]["vocab"].items()))
    file.write_text(json.dumps(content, indent=1))
    assert tokenizer_digest(tmp_path) == tokenizer_digest(folder)
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    assert tokenizer_digest(tmp_path) != tokenizer_digest(folder)


@pytest.mark.parametrize("text", [MIXED, "👩‍🚀" * 30, "ab" * 60, "東京" * 40])
def test_a_piece_never_holds_half_a_character(codec: TextCodec, text: str) -> None:
    decoder = IncrementalDecoder(codec)
    ids = codec.encode(text)
    assert len(ids) > 30
    pieces = [decoder.push([i]) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text, "whole characters come at once, so nothing is left for the end"
    assert decoder.flush() == ""


def test_text_is_not_held_back_without_need(codec: TextCodec) -> None:
    decoder = IncrementalDecoder(codec)
    ids = codec.encode("Plain words come at once.")
    assert [decoder.push([i]) for i in ids] == [codec.decode([i]) for i in ids]


def test_an_unfinished_character_comes_out_at_the_end(codec: TextCodec) -> None:
    decoder = IncrementalDecoder(codec)
    ids = codec.encode("🧑🏽")[:-1]
    shown = decoder.push(ids)
    assert "\ufffd" not in shown
    assert shown + decoder.flush() == codec.decode(ids)
    assert decoder.push(codec.encode("again")) == "again", "after flush it is ready for another text"


def test_special_tokens_inside_a_character_do_not_break_it(codec: TextCodec) -> None:
    first, *rest = codec.encode("🚀")
    decoder = IncrementalDecoder(codec)
    pieces = [decoder.push([i]) for i in (first, *[0] * 100, *rest)]
    assert "".join(pieces) == "🚀"


@pytest.fixture(scope="module")
def byte_ids(folder: Path) -> list[int]:
    """Ids of single bytes: the first byte of 4, 3 and 2, two that follow, a letter."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocab[chr(byte)] for byte in (0xF0, 0xE2, 0xC3, 0xA1, 0xBF, ord("a"))]


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_pieces_are_together_the_text(codec: TextCodec, byte_ids: list[int], data: st.DataObject) -> None:
    byte, token = st.sampled_from(byte_ids), st.integers(0, VOCAB_SIZE - 1)
    chunk = st.lists(byte, max_size=30) | st.lists(byte | token, max_size=60)
    chunks = data.draw(st.lists(chunk, max_size=8))
    decoder = IncrementalDecoder(codec)
    text = "".join(decoder.push(chunk) for chunk in chunks) + decoder.flush()
    assert text == codec.decode([i for chunk in chunks for i in chunk])


def test_runs_of_broken_bytes_are_counted_exactly(codec: TextCodec, byte_ids: list[int]) -> None:
    four, three, _, follows, *_ = byte_ids
    for pattern in ([four, follows, follows], [three, follows], [four], [follows], [four, three, follows]):
        for length in range(1, 130):
            decoder = IncrementalDecoder(codec)
            ids = (pattern * length)[:length]
            text = "".join(decoder.push([i]) for i in ids) + decoder.flush()
            assert text == codec.decode(ids), (pattern, length)


@pytest.mark.parametrize("text", ["🚀", "x", "\ufffd"])
def test_the_cost_of_a_token_does_not_grow(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    seen: list[int] = []
    decode = codec.decode
    monkeypatch.setattr(codec, "decode", lambda ids: seen.append(len(ids)) or decode(ids))  # type: ignore[func-returns-value]
    decoder = IncrementalDecoder(codec)
    token = codec.encode(text)[0]
    for _ in range(500):
        decoder.push([token])
    assert max(seen) < 80
