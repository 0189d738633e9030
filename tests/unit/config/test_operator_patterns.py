"""Translation of name-regex(...): Python matches what std::regex matches (ECMAScript grammar)."""

from __future__ import annotations

import re

import pytest

from rankdump._config.operator_patterns import translate_expression

# What a program compiled with libstdc++'s std::regex_match answered.
MATCHED = [
    ("(?:a)b", "ab"),
    ("a(?=b)b", "ab"),
    ("a(?!b)c", "ac"),
    ("[[:alpha:]]+", "abC"),
    ("[[:ALPHA:]]", "a"),
    ("[[:d:]][[:w:]][[:s:]]", "1_ "),
    ("[[:blank:]]", " "),
    ("[[:punct:]]+", "!/-_"),
    ("[[:xdigit:]]+", "aF0"),
    ("[[:alpha:][:digit:]_]+", "a1_"),
    ("[:alpha:]", "a"),
    ("[^]", "a"),
    ("]", "]"),
    ("}", "}"),
    ("a{2,}", "aaa"),
    ("a{2,3}?", "aaa"),
    ("()", ""),
    ("[--a]", "0"),
    ("[a-]", "-"),
    ("[[a]", "["),
    ("[&&]", "&"),
    ("[a-z&&[aeiou]]", "a]"),
    ("[!-~]", "a"),
    ("|a", "a"),
    ("a||b", "b"),
    ("^a$", "a"),
    (r"\d\/\-\_\x41\u0041", "1/-_AA"),
    (r"(a)\1", "aa"),
    (r"[\d]", "1"),
]
NOT_MATCHED = [("[]", "a"), ("[]a]", "a]"), ("[a-c-e]", "d"), ("[^[:digit:]]", "5"), ("a", "aa")]


@pytest.mark.parametrize(("pattern", "text"), MATCHED)
def test_translated_expression_matches_like_std_regex(pattern: str, text: str):
    """What std::regex matches as a whole is matched."""
    assert re.fullmatch(translate_expression(pattern), text)


@pytest.mark.parametrize(("pattern", "text"), NOT_MATCHED)
def test_translated_expression_rejects_like_std_regex(pattern: str, text: str):
    """What std::regex does not match is not."""
    assert not re.fullmatch(translate_expression(pattern), text)


@pytest.mark.parametrize("name", ["alpha", "digit", "alnum", "upper", "lower", "xdigit", "punct"])
def test_posix_classes_hold_the_ascii_characters_of_c(name: str):
    """A POSIX class holds the ASCII characters that C's own test of that name holds."""
    tests = {
        "alpha": str.isalpha,
        "digit": str.isdigit,
        "alnum": str.isalnum,
        "upper": str.isupper,
        "lower": str.islower,
        "xdigit": lambda c: c in "0123456789abcdefABCDEF",
        "punct": lambda c: c.isprintable() and not c.isalnum() and c != " ",
    }
    expression = re.compile(translate_expression(f"[[:{name}:]]"))
    for code in range(128):
        assert bool(expression.fullmatch(chr(code))) is tests[name](chr(code)), code
