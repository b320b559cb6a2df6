"""Personal data in a log's texts: what has a form is found wherever it stands, what only looks like it stays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench.workloads.masking import mask

SECRETS = [
    ("<key>", "sk-proj-aB3dE6gH9jK2mN5pQ8"),
    ("<key>", "AKIAIOSFODNN7EXAMPLE"),
    ("<key>", "ghp_" + "a1B2" * 9),
    ("<key>", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_123"),
    ("<key>", "xoxb-123456789012-abc"),
    ("<iban>", "DE89370400440532013000"),
    ("<iban>", "GB82 WEST 1234 5698 7654 32"),
    ("<iban>", "ES91 2100 0418 4502 0005 1332"),
    ("<card>", "378282246310005"),
    ("<card>", "3782 822463 10005"),
    ("<card>", "5555-5555-5555-4444"),
    ("<ip>", "192.168.10.254"),
    ("<ip>", "2001:db8:0:1::42"),
    ("<phone>", "+49 (0)171 1234567"),
    ("<phone>", "+1-212-555-0123"),
    ("<phone>", "(212) 555-0123"),
    ("<phone>", "212.555.0123"),
    ("<phone>", "0171 1234567"),
    ("<phone>", "030/1234567"),
    ("<phone>", "01 23 45 67 89"),
    ("<phone>", "07911123456"),
    ("<phone>", "0044 20 7946 0958"),
]


@pytest.mark.parametrize(("placeholder", "secret"), SECRETS)
@pytest.mark.parametrize(
    "frame", ["{}", "My number: {}, thanks.", "({})", "x={}\ny", "so {} AND NOW", "'{}': ok"]
)
def test_secrets_are_masked_wherever_they_stand(placeholder: str, secret: str, frame: str) -> None:
    text, found = mask(frame.format(secret))
    assert text == frame.format(placeholder)
    assert found == {placeholder: 1}


def test_a_bearer_token_leaves_the_word_before_it() -> None:
    assert mask("Authorization: Bearer abcdefghij0123456789==")[0] == "Authorization: Bearer <key>"


@pytest.mark.parametrize(
    "text",
    [
        "On 2031-04-17 at 12:30:45, room 204, 3.14159265358979, 1,234,567 items",
        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
        "xs[::2], xs[1::2], std::vector<a::b>, abc::def::fed",
        "card 4111 1111 1111 1112 and DE88370400440532013000 have wrong check digits",
        "ask-me-anything-you-like-now, task-force-one-two-three",
        "01/02/2031 and 01-02-2031, 999.1.1.1, version 1.2.3",
        "@decorator, user @ home, a@b",
        "the bearer certificates",
        "12 + 30 - 7 = 35; 0.0625 * 1600",
    ],
)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert mask(text) == (text, {})


LETTERS = st.text(st.characters(codec="utf-8"), max_size=12)
GAP = st.sampled_from([" ", "\n", ", ", " (", "; "])


@given(LETTERS, GAP, st.emails())
@settings(max_examples=200, deadline=None)
def test_no_email_survives(before: str, gap: str, email: str) -> None:
    text, found = mask(f"{before}{gap}{email}{gap}{before}")
    assert email not in text
    assert found["<email>"] >= 1


# Version 6 with fewer than three groups is said to stay.
ADDRESSES = st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str).filter(
    lambda text: len([group for group in text.split(":") if group]) >= 3
)


@given(LETTERS, GAP, ADDRESSES)
@settings(max_examples=200, deadline=None)
def test_no_ip_address_survives(before: str, gap: str, address: str) -> None:
    text, found = mask(f"{before}{gap}{address}{gap}{before}")
    assert address not in text
    assert found


@given(st.integers(2, 9), st.integers(10**11, 10**14 - 1), st.sampled_from(["", " ", "-"]))
@settings(max_examples=200, deadline=None)
def test_no_card_number_survives(first: int, rest: int, gap: str) -> None:
    body = f"{first}{rest:014d}"
    card = next(f"{body}{check}" for check in range(10) if _is_luhn(f"{body}{check}"))
    shown = gap.join(card[i : i + 4] for i in range(0, 16, 4))
    assert mask(f"pay with {shown}.") == ("pay with <card>.", {"<card>": 1})


def _is_luhn(number: str) -> bool:
    doubled = {"0": 0, "1": 2, "2": 4, "3": 6, "4": 8, "5": 1, "6": 3, "7": 5, "8": 7, "9": 9}
    digits = [doubled[d] if position % 2 else int(d) for position, d in enumerate(reversed(number))]
    return sum(digits) % 10 == 0


def test_masking_a_long_text_without_gaps_is_quick() -> None:
    """Patterns that tried every start of a long run anew would take hours here."""
    for text in (
        "a" * 200_000,
        "1" * 200_000,
        "ab12" * 50_000,
        "a." * 100_000,
        "0 " * 100_000,
        "1:" * 100_000 + "x",
    ):
        assert mask(text)[0] == text
