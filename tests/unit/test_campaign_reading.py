"""Reading a campaign's file, byte by byte: marks, ends of lines, limits and gzip."""

import gzip
import random
import tracemalloc
from collections.abc import Iterator

import pytest
from rushes_core.campaigns.items import Terms, resolve_line
from rushes_core.campaigns.lines import (
    Content,
    FileUnreadable,
    LineError,
    Reader,
    format_of,
    survey,
)
from rushes_core.ids import video_ids
from rushes_core.served_model import ServedModel
from rushes_worker.campaigns.chunks import chunks
from support.campaign_lines import PIECES, content_of, line, offline_model, records, values


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return offline_model(tmp_path_factory.mktemp("lines"))


@pytest.mark.parametrize("piece", PIECES)
class TestBytesOrderMark:
    """B070"""

    def test_the_first_line_of_a_marked_file_is_whole(self, piece: int) -> None:
        rows = b"".join(line(custom_id=name, prompt="p") for name in "abc")
        found = values(records(b"\xef\xbb\xbf" + rows, piece=piece))
        assert [value["custom_id"] for value in found.values()] == ["a", "b", "c"]
        assert list(found) == [1, 2, 3]

    def test_the_first_column_of_a_marked_table_has_its_name(self, piece: int) -> None:
        found = values(records(b"\xef\xbb\xbfcustom_id,prompt\r\na,p\r\n", "csv", piece=piece))
        assert found == {2: {"custom_id": "a", "prompt": "p"}}

    @pytest.mark.parametrize(
        ("encoding", "name"), [("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-32-le", "UTF-32")]
    )
    @pytest.mark.parametrize("mark", ["\ufeff", ""])
    def test_another_encoding_is_refused_by_its_name(self, piece: int, encoding: str, name: str, mark: str) -> None:
        data = f'{mark}{{"prompt":"p"}}\n'.encode(encoding)
        for kind in ("jsonl", "csv"):
            with pytest.raises(FileUnreadable, match=name) as refusal:
                records(data, kind, piece=piece)
            assert refusal.value.code == "unsupported_encoding"
        with pytest.raises(FileUnreadable, match=name):
            survey(content_of(data, piece=piece), max_lines=10)


@pytest.mark.parametrize("piece", PIECES)
class TestLines:
    """B074, B075"""

    def test_bad_lines_are_told_by_their_number(self, piece: int) -> None:
        rows = [
            b'{"prompt":"good"}',
            b"{",
            b"",
            b"[]",
            b'"x"',
            b"null",
            b'{"prompt":"a","prompt":"b"}',
            b'{"prompt":NaN}',
            b'{"prompt":"\xff"}',
            b'{"prompt":"good"}',
        ]
        found = values(records(b"\n".join(rows), piece=piece))
        assert found == {
            1: {"prompt": "good"},
            2: "invalid_line",
            4: "invalid_line",
            5: "invalid_line",
            6: "invalid_line",
            7: "duplicate_parameter",
            8: "invalid_line",
            9: "invalid_line",
            10: {"prompt": "good"},
        }

    @pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n", b"\n \t\r\n"])
    @pytest.mark.parametrize("last", [True, False])
    def test_ends_of_lines_make_no_difference(self, piece: int, end: bytes, last: bool) -> None:
        data = end.join(line(custom_id=name, prompt="p").strip() for name in "abc") + (end if last else b"")
        found = records(data, piece=piece)
        step = end.count(b"\n")
        assert {one.line: one.value["custom_id"] for one in found if one.value} == {
            1: "a",
            1 + step: "b",
            1 + 2 * step: "c",
        }

    def test_a_cut_off_last_line_is_an_error_of_that_line(self, piece: int) -> None:
        found = values(records(line(prompt="a") + line(prompt="b") + line(prompt="c")[:-4], piece=piece))
        assert found == {1: {"prompt": "a"}, 2: {"prompt": "b"}, 3: "invalid_line"}

    def test_a_cut_off_last_record_is_an_error_of_its_first_line(self, piece: int) -> None:
        found = values(records(b'prompt\na\n"b\nc', "csv", piece=piece))
        assert found == {2: {"prompt": "a"}, 3: "invalid_line"}

    def test_a_reader_goes_on_where_another_one_ended(self, piece: int) -> None:
        jsonl = b"\xef\xbb\xbf" + b"\n".join(line(prompt=str(i)) + b"x" * (i % 3) for i in range(20))
        table = b"prompt,seed\r\n" + b'"a\nb",1\r\n\r\nplain,2\r\n"c""d",3\r\nbroken\r\nlast,4'
        for data, kind in ((jsonl, "jsonl"), (table, "csv"), (gzip.compress(table), "csv")):
            whole = records(data, kind, piece=piece)
            assert len(whole) > 4
            for number, one in enumerate(whole):
                assert records(data, kind, piece=piece, start=one.end) == whole[number + 1 :]


class TestLimits:
    """B081"""

    def test_a_monstrous_line_is_passed_over(self) -> None:
        data = (
            line(prompt="first")
            + b'{"prompt":"' + b"x" * 30_000_000 + b'"}\n'
            + b"[" * 100_000 + b"\n"
            + b'{"prompt":"p","seed":' + b"9" * 5_000 + b"}\n"
            + line(prompt="last")
        )  # fmt: skip
        found = values(records(data, max_line=1_048_576))
        assert found == {
            1: {"prompt": "first"},
            2: "line_too_long",
            3: "invalid_line",
            4: "invalid_line",
            5: {"prompt": "last"},
        }

    def test_one_line_without_end_takes_no_memory(self) -> None:
        def read(start: int) -> Iterator[bytes]:
            for _ in range(400):
                yield b"x" * 262_144

        content = Content(read, num_bytes=400 * 262_144, max_bytes=2**31)
        tracemalloc.start()
        try:
            found = values(list(Reader(content, kind="jsonl", max_line_bytes=1_048_576)))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert found == {1: "line_too_long"}
        assert peak < 8_000_000

    def test_long_lines_are_never_in_memory_together(self, model: ServedModel) -> None:
        """B080"""
        num_lines = 9_000
        row = line(prompt="A gull over the harbour. " * 160)

        def read(start: int) -> Iterator[bytes]:
            assert start == 0
            return (row * 50 for _ in range(num_lines // 50))

        content = Content(read, num_bytes=num_lines * len(row), max_bytes=2**31)
        reader = Reader(content, kind="jsonl", max_line_bytes=1_048_576)
        count = 0
        tracemalloc.start()
        try:
            for chunk in chunks(reader, Terms(model), video_ids()):
                count += len(chunk.loaded)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (count, reader.position) == (num_lines, (num_lines * len(row), num_lines))
        assert num_lines * len(row) > 36_000_000
        assert peak < 25_000_000

    def test_a_quote_that_is_never_closed_ends_at_the_limit(self) -> None:
        data = b'prompt,seed\nok,1\n"never\n' + b"more,2\n" * 1_000
        found = records(data, "csv")
        assert found[0].value == {"prompt": "ok", "seed": 1}
        assert found[1].error is not None
        assert found[1].error.code == "line_too_long"
        assert (found[1].line, found[1].end.num_lines) == (3, found[2].line - 1)
        assert found[2].value == {"prompt": "more", "seed": 2}

    def test_a_long_line_of_a_table_leaves_the_next_one_whole(self) -> None:
        found = values(records(b"prompt\n" + b"x" * 2_000 + b"\nok\n", "csv"))
        assert found == {2: "line_too_long", 3: {"prompt": "ok"}}

    def test_too_many_lines_and_bytes_are_told_before_any_is_read(self) -> None:
        rows = line(prompt="p") * 11
        assert survey(content_of(rows), max_lines=11) == (len(rows), 11)
        assert survey(content_of(rows[:-1]), max_lines=11) == (len(rows) - 1, 11)
        with pytest.raises(FileUnreadable, match="at most 10 lines") as refusal:
            survey(content_of(rows), max_lines=10)
        assert refusal.value.code == "too_many_lines"
        for data in (rows, gzip.compress(rows)):
            with pytest.raises(FileUnreadable, match="at most 100 bytes") as refusal:
                survey(content_of(data, max_bytes=100), max_lines=100)
            assert refusal.value.code == "file_too_large"

    @pytest.mark.parametrize("data", [b"", b"\n" * 1_000_000, b"\xef\xbb\xbf", gzip.compress(b" \r\n" * 1_000_000)])
    def test_a_file_without_requests_is_refused(self, data: bytes) -> None:
        with pytest.raises(FileUnreadable) as refusal:
            survey(content_of(data), max_lines=2_000_000)
        assert refusal.value.code == "no_requests"


@pytest.mark.parametrize("piece", PIECES)
class TestGzip:
    def test_every_member_is_read(self, piece: int) -> None:
        data = gzip.compress(line(prompt="a")) + gzip.compress(b"") + gzip.compress(line(prompt="b")) + bytes(512)
        assert values(records(data, piece=piece)) == {1: {"prompt": "a"}, 2: {"prompt": "b"}}

    def test_a_cut_off_file_is_unreadable(self, piece: int) -> None:
        data = gzip.compress(b"".join(line(prompt=str(random.random())) for _ in range(100)))
        for length in (3, 11, 200, len(data) - 8, len(data) - 1):
            with pytest.raises(FileUnreadable, match=f"cut off at byte {length}") as refusal:
                survey(content_of(data[:length], piece=piece), max_lines=1_000)
            assert refusal.value.code == "invalid_gzip"

    def test_a_damaged_file_is_unreadable(self, piece: int) -> None:
        data = gzip.compress(b"".join(line(prompt=str(random.random())) for _ in range(100)))
        for damaged in (data[:-6] + b"\0" * 6, data + b"more"):
            with pytest.raises(FileUnreadable, match="damaged after byte") as refusal:
                survey(content_of(damaged, piece=piece), max_lines=1_000)
            assert refusal.value.code == "invalid_gzip"


def test_a_bomb_is_not_decompressed() -> None:
    data = gzip.compress(b"\n" * 200_000_000, 9)
    with pytest.raises(FileUnreadable, match="250 times") as refusal:
        survey(content_of(data, piece=4_096), max_lines=10**9)
    assert refusal.value.code == "file_too_large"


_PLAIN = line(prompt="a", metadata={"a": "b"}) + line(custom_id="x", body={"prompt": "\u00e9", "seed": 1})


_TABLE = '\ufeffcustom_id;prompt;seed;metadata.a\r\n1;"a\r\nb";5;x\r\n2;\u00e9;;"q""q";\r\n'.encode()


_ODD = [b'"', b"\n", b"\r", b"\0", b"\xff", b"{", b"]", b";", b"\t", b"\\ud800", b"1e999", b"\xef\xbb\xbf", b'"body":{']


def test_no_bytes_break_a_reader(model: ServedModel) -> None:
    chance = random.Random(70)
    num_read = 0
    for _ in range(1_500):
        data = bytearray(chance.choice([_PLAIN, _TABLE, gzip.compress(_PLAIN)]))
        for _ in range(chance.choice([1, 2, 5])):
            place = chance.randrange(len(data))
            data[place : place + chance.randrange(3)] = chance.choice([*_ODD, bytes([chance.randrange(256)])])
        outcomes = [_outcomes(bytes(data), piece, model) for piece in (3, 262_144)]
        assert outcomes[0] == outcomes[1], data
        num_read += isinstance(outcomes[0], list)
    assert num_read > 500


def _outcomes(data: bytes, piece: int, model: ServedModel) -> object:
    """What becomes of every line, but for what is drawn; or why the file cannot be read."""
    content = content_of(data, piece=piece)
    try:
        survey(content, max_lines=1_000)
        found: list[object] = []
        for one in Reader(content, kind=format_of(content.head(), "lines"), max_line_bytes=500):
            outcome = one.error if one.value is None else resolve_line(one.value, Terms(model))
            found.append((one.line, one.end, outcome if isinstance(outcome, LineError) else one.value))
        return found
    except FileUnreadable as error:
        return error.code


@pytest.mark.parametrize(
    ("head", "filename", "kind"),
    [
        (b'{"prompt"', "a.csv", "jsonl"),
        (b'\xef\xbb\xbf\n {"prompt"', "a", "jsonl"),
        (b"prompt,seed", "a.txt", "csv"),
        (b"prompt", "a.CSV", "csv"),
        (b"[]\n", "lines.jsonl", "jsonl"),
        (b"oops\n", "lines.jsonl.gz", "jsonl"),
        (b"[1]", "a", "jsonl"),
    ],
)
def test_the_beginning_tells_the_format_before_the_name(head: bytes, filename: str, kind: str) -> None:
    assert format_of(head, filename) == kind
