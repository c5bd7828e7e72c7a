"""Range and entity-tag headers, by RFC 9110."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rushes_api.byte_range import ByteRange, Unsatisfiable, etag_matches, parse_range


@pytest.mark.parametrize(
    ("header", "first", "last"),
    [
        ("bytes=0-1", 0, 1),
        ("bytes=0-", 0, 99),
        ("bytes=-10", 90, 99),
        ("bytes=-500", 0, 99),
        ("bytes=99-", 99, 99),
        ("bytes=5-1000", 5, 99),
        ("Bytes = 5-6", 5, 6),
        ("bytes=0-0,", 0, 0),
        (f"bytes=7-{10**30}", 7, 99),
        (f"bytes=-{'9' * 5_000}", 0, 99),
    ],
    ids=lambda value: str(value)[:20],
)
def test_single_ranges(header: str, first: int, last: int) -> None:
    assert parse_range(header, 100) == ByteRange(first, last)


@pytest.mark.parametrize("header", [None, "items=0-1", "bytes=0-1,4-5", "bytes", "", "seconds=1-2"])
def test_what_is_not_one_byte_range_is_answered_with_the_whole(header: str | None) -> None:
    assert parse_range(header, 100) is None


@pytest.mark.parametrize(
    "header",
    [
        *("bytes=100-", "bytes=5-4", "bytes=-0", "bytes=-", "bytes=", "bytes=a-b", "bytes=1", "bytes=--1"),
        *("bytes=１-２", f"bytes={'9' * 5_000}-"),
    ],
    ids=lambda value: value[:20],
)
def test_what_cannot_be_satisfied_is_refused(header: str) -> None:
    with pytest.raises(Unsatisfiable):
        parse_range(header, 100)


@given(st.integers(0, 120), st.integers(0, 120), st.integers(1, 100))
def test_a_range_lies_within_the_representation(first: int, last: int, num_bytes: int) -> None:
    try:
        part = parse_range(f"bytes={first}-{last}", num_bytes)
    except Unsatisfiable:
        assert last < first or first >= num_bytes
    else:
        assert part is not None
        assert 0 <= part.first == first <= part.last <= min(last, num_bytes - 1)


@pytest.mark.parametrize(
    ("header", "matches"),
    [
        *((None, False), ('"a"', True), ('W/"a"', True), ('"b", "a"', True), ("*", True), ('"b"', False), ("a", False)),
        *(('"b","a"', True), ('"x,y" , W/"a"', True), ("\t*", True), ('"*"', False), ('"b", *', False), ('"A"', False)),
    ],
)
def test_entity_tags(header: str | None, matches: bool) -> None:
    assert etag_matches(header, '"a"') is matches


def test_a_weak_tag_is_no_strong_match() -> None:
    assert not etag_matches('W/"a"', '"a"', weak=False)
