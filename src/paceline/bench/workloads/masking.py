"""Personal data and secrets in texts of a log, replaced by placeholders that say what stood there.

By pattern, in a fixed order: it finds what has a form. Names, streets and anything said in words stay; whoever shares a
report must know that.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable

_EMAIL = re.compile(r"(?<![\w!#$%&'*+/=?^`{|}~.-])[\w!#$%&'*+/=?^`{|}~.-]+@[\w-]+(?:\.[\w-]+)+")
_KEY = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"sk-[\w-]{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{20,}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|(?i:(?<=bearer )|(?<=bearer:))[\w.~+/-]{20,}=*)"
)
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])")
_CARD = re.compile(
    r"(?<![\w.])(?:\d{13,19}|\d{4}(?P<four>[ -])\d{4}(?P=four)\d{4}(?P=four)\d{1,7}"
    r"|\d{4}(?P<six>[ -])\d{6}(?P=six)\d{4,5})(?!\w)"
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)")
_IPV6 = re.compile(r"(?<![\w.])(?:::)?[0-9A-Fa-f]{1,4}(?:::?[0-9A-Fa-f]{1,4}){2,7}(?:::)?(?!\w|:[\w:])")
_PHONE = re.compile(
    r"(?<![\w+])(?<!\d[.,])(?:"
    r"(?:\+|00)[1-9](?:[ ()./-]{0,2}\d){7,14}"  # with a country's code
    r"|(?:\([2-9]\d\d\)|[2-9]\d\d)[ .-]{1,2}\d{3}[ .-]\d{4}"  # North America
    r"|(?!\d\d?[/-]\d\d?[/-])(?:\(0\d{1,5}\)|0\d{1,5})(?:[ /-]{1,3}\d{2,8}){1,4}"  # a leading 0, in groups; not a date
    r"|0\d{8,11}"
    r")(?![\w]|[.,]\d)"
)


def mask(text: str) -> tuple[str, Counter[str]]:
    """Returns the text with placeholders, and how many of each sort. Pure.

    Found are e-mail addresses; keys of well-known services, JSON web tokens and bearer tokens; account numbers (IBAN)
    and card numbers, both only with a valid check digit; IP addresses (version 6 from three groups on: shorter ones
    read like slices and names in code); telephone numbers with a country's code, as in North America, or with a
    leading 0.
    """
    found: Counter[str] = Counter()
    for placeholder, pattern, replace in _SORTS:

        def put(match: re.Match[str], placeholder: str = placeholder, replace: _Rule = replace) -> str:
            length = replace(match[0])
            if not length:
                return match[0]
            found[placeholder] += 1
            return placeholder + match[0][length:]

        text = pattern.sub(put, text)
    return text, found


_Rule = Callable[[str], int]
"""Says how much of a match, from its start, is what was looked for; 0 is nothing."""


def _valid_iban(text: str) -> int:
    """The pattern may run on into words in capitals, so each end at a space is tried, the longest first."""
    ends = [len(text), *(match.start() for match in re.finditer(" ", text))]
    return next((end for end in sorted(ends, reverse=True) if _divides(text[:end].replace(" ", ""))), 0)


def _divides(iban: str) -> bool:
    digits = "".join(str(int(letter, 36)) for letter in iban[4:] + iban[:4])
    return 15 <= len(iban) <= 34 and int(digits) % 97 == 1


def _valid_card(text: str) -> int:
    digits = [int(letter) for letter in reversed(text) if letter.isdecimal()]
    total = sum(digits[::2]) + sum(sum(divmod(2 * digit, 10)) for digit in digits[1::2])
    return len(text) if total % 10 == 0 and len(digits) <= 19 else 0


def _valid_address(text: str) -> int:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return 0
    return len(text)


def _dialled(text: str) -> int:
    return len(text) if 8 <= sum(letter.isdecimal() for letter in text) <= 16 else 0


_SORTS: tuple[tuple[str, re.Pattern[str], _Rule], ...] = (
    ("<email>", _EMAIL, len),
    ("<key>", _KEY, len),
    ("<iban>", _IBAN, _valid_iban),
    ("<card>", _CARD, _valid_card),
    ("<ip>", _IPV4, _valid_address),
    ("<ip>", _IPV6, _valid_address),
    ("<phone>", _PHONE, _dialled),
)
