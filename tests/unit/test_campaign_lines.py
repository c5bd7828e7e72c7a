"""Reading a campaign's file, and what its lines ask for."""

import gzip
import json
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from rushes_core.campaigns.items import Item, Terms, merge, resolve_line
from rushes_core.campaigns.lines import (
    BEGINNING,
    Content,
    FileUnreadable,
    LineError,
    Position,
    Reader,
    Record,
    format_of,
    survey,
)
from rushes_core.errors import InvalidRequest
from rushes_core.ids import video_ids
from rushes_core.request import ResolvedRequest, resolve
from rushes_core.served_model import ServedModel
from rushes_core.settings import Settings
from rushes_worker.campaigns.chunks import chunks
from support.checkpoints import tiny_checkpoint

MAX_LINE = 1_000
PIECES = (1, 7, 262_144)
"""Sizes of the pieces in which the bytes come: no meaning may hang on them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.load(
        Settings(
            database_url="postgresql+psycopg://nobody@127.0.0.1:1/none",
            redis_url="redis://127.0.0.1:1/0",
            s3_bucket="none",
            checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("lines")),
        )
    )


def content_of(data: bytes, *, piece: int = 262_144, max_bytes: int = 2**31) -> Content:
    def read(start: int) -> Iterator[bytes]:
        return (data[i : i + piece] for i in range(start, len(data), piece))

    return Content(read, num_bytes=len(data), max_bytes=max_bytes)


def records(
    data: bytes, kind: str = "jsonl", *, piece: int = 262_144, start: Position = BEGINNING, max_line: int = MAX_LINE
) -> list[Record]:
    return list(Reader(content_of(data, piece=piece), kind=kind, start=start, max_line_bytes=max_line))


def values(found: list[Record]) -> dict[int, Any]:
    """What was read, by line: the members, or the error's code."""
    return {one.line: one.value if one.error is None else one.error.code for one in found}


def line(**members: Any) -> bytes:
    return json.dumps(members).encode() + b"\n"


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
        num_lines = 15_000
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
        assert num_lines * len(row) > 60_000_000
        assert peak < 30_000_000

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


class TestTables:
    """B078"""

    def test_cells_are_text_as_they_are_written(self) -> None:
        prompts = ["NA", "null", "nan", "None", "00123", "1e5", "TRUE", "=1+1", " padded ", "a,b", 'say "hi"', "1\r\n2"]
        quoted = "\r\n".join(f'"{prompt}"'.replace('"hi"', '""hi""') + ",007" for prompt in prompts)
        found = records(f"prompt,custom_id\r\n{quoted}\r\n".encode(), "csv")
        assert [one.value for one in found] == [{"prompt": prompt, "custom_id": "007"} for prompt in prompts]

    def test_an_empty_cell_is_absent_and_an_empty_row_is_blank(self) -> None:
        found = values(records(b"custom_id;prompt;seed\na;;1\n;;\n\n1E3;p;\n", "csv"))
        assert found == {2: {"custom_id": "a", "seed": 1}, 5: {"custom_id": "1E3", "prompt": "p"}}

    @pytest.mark.parametrize("mark", [",", ";", "\t"])
    def test_the_header_tells_the_delimiter(self, mark: str) -> None:
        others = [other for other in ",;\t" if other != mark]
        data = f'prompt{mark}metadata.a\nx{others[0]}{others[1]}"y"{mark}v\n"x{mark}",\n'
        assert values(records(data.encode(), "csv")) == {
            2: {"prompt": f'x{others[0]}{others[1]}"y"', "metadata": {"a": "v"}},
            3: {"prompt": f"x{mark}"} if mark == "," else "invalid_line",
        }

    @pytest.mark.parametrize("piece", PIECES)
    @pytest.mark.parametrize(
        ("first", "mark"), [("sep=;", ";"), ('"sep=;"', ";"), ("SEP=,", ","), ("sep=\t", "\t"), ("sep=|", "|")]
    )
    def test_a_first_line_may_tell_the_delimiter(self, first: str, mark: str, piece: int) -> None:
        data = f"\ufeff{first}\r\nprompt{mark}seed\r\na, b{mark}1\r\nc{mark}2\r\n".replace(
            "a, b", "a b" if mark == "," else "a, b"
        ).encode()
        found = records(data, "csv", piece=piece)
        assert [one.line for one in found] == [3, 4]
        assert found[1].value == {"prompt": "c", "seed": 2}
        assert records(data, "csv", piece=piece, start=found[0].end) == found[1:]
        assert format_of(data, "shots.csv") == "csv"

    def test_only_one_line_tells_the_delimiter(self) -> None:
        with pytest.raises(FileUnreadable, match="sep="):
            records(b"sep=;\nsep=,\nprompt\na\n", "csv")

    def test_columns_are_members_of_a_request(self) -> None:
        header = (
            "custom_id,prompt,seconds,seed,priority,metadata.client,metadata.a.b,target.short_edge,"
            "target.aspect_ratio,output.thumbnail,output.key_prefix,retention.seconds"
        )
        found = records(f"{header}\nid,p,5,42,70,acme,x,480,16:9,FALSE,night,3600\n".encode(), "csv")
        assert found[0].value == {
            "custom_id": "id",
            "prompt": "p",
            "seconds": "5",
            "seed": 42,
            "priority": 70,
            "metadata": {"client": "acme", "a.b": "x"},
            "target": {"short_edge": 480, "aspect_ratio": "16:9"},
            "output": {"thumbnail": False, "key_prefix": "night"},
            "retention": {"seconds": 3600},
        }

    @pytest.mark.parametrize(
        ("header", "code", "param"),
        [
            (b"prompt,promt", "unknown_parameter", "promt"),
            (b",", "unknown_parameter", ""),
            (b"prompt,seed\rx,1\ry,2", "invalid_header", None),
            (b"prompt,metadata", "unknown_parameter", "metadata"),
            (b"prompt,target.size", "unknown_parameter", "target.size"),
            (b"prompt,seed,prompt", "duplicate_parameter", "prompt"),
            (b"A ship at sea", "unknown_parameter", "A ship at sea"),
            (b'"prompt', "invalid_header", None),
            (b"pr\xffmpt", "unsupported_encoding", None),
            (b"x" * 2_000, "invalid_header", None),
        ],
    )
    def test_a_header_that_names_no_column_makes_the_file_unreadable(
        self, header: bytes, code: str, param: str | None
    ) -> None:
        with pytest.raises(FileUnreadable) as refusal:
            records(header + b"\nx,y\n", "csv")
        assert (refusal.value.code, refusal.value.param) == (code, param)

    def test_a_header_is_told_the_columns_that_lines_may_have(self) -> None:
        with pytest.raises(FileUnreadable) as refusal:
            records(b"prompt,x\np,y\n", "csv")
        known = str(refusal.value).partition("known: ")[2].split(", ")
        assert {"custom_id", "prompt", "seed", "metadata.NAME"} <= set(known)
        assert not {"webhook_url", "callback_url", "webhook_events", "not_before"} & set(known)

    def test_a_line_that_is_null_is_told_so(self) -> None:
        (found,) = records(b"null\n", "jsonl")
        assert found.error is not None
        assert found.error.message.endswith("got null")

    def test_columns_without_a_name_may_be_empty(self) -> None:
        found = records(b"custom_id,prompt,,\na,p,,\nb,p,,note\n", "csv")
        assert found[0].value == {"custom_id": "a", "prompt": "p"}
        assert found[1].error == LineError("invalid_line", None, "column 4 has no name in the header")

    def test_a_quote_that_is_never_closed_is_told_with_the_lines_that_it_took(self) -> None:
        found = records(b'prompt,seed\na,1\n"b,2\nc,3\nd,4\n', "csv")
        assert [one.line for one in found] == [2, 3]
        assert found[1].error is not None
        assert "lines 3 to 5: a quote in it is not closed" in found[1].error.message

    def test_rows_that_do_not_fit_are_told_by_their_first_line(self) -> None:
        data = b'prompt,seed\n"a\nb",1\nshort\nlong,1,2\n"q"x,1\nbad \xff,1\nquote "in" text,7\n'
        assert values(records(data, "csv")) == {
            2: {"prompt": "a\nb", "seed": 1},
            4: "invalid_line",
            5: "invalid_line",
            6: "invalid_line",
            7: "invalid_line",
            8: {"prompt": 'quote "in" text', "seed": 7},
        }


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


BODY = {"prompt": "A gull over the harbour", "seconds": 5}


def openai(**changes: Any) -> dict[str, Any]:
    members: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/videos", "body": BODY}
    return {name: value for name, value in (members | changes).items() if value is not ...}


class TestResolveLine:
    def test_both_forms_of_a_line_ask_for_the_same(self, model: ServedModel) -> None:
        plain = resolve_line({**BODY, "custom_id": "a", "seed": 1}, Terms(model))
        wrapped = resolve_line(openai(body={**BODY, "seed": 1}), Terms(model))
        assert isinstance(plain, Item)
        assert plain == wrapped
        assert (plain.custom_id, plain.seed, plain.num_frames, plain.priority) == ("a", 1, 124, None)

    def test_a_plain_line_may_do_without_an_id(self, model: ServedModel) -> None:
        found = resolve_line(BODY, Terms(model))
        assert isinstance(found, Item)
        assert found.custom_id is None

    @pytest.mark.parametrize(
        ("value", "code", "param"),
        [
            (openai(custom_id=...), "missing_required_parameter", "custom_id"),
            (openai(custom_id=None), "missing_required_parameter", "custom_id"),
            (openai(custom_id=""), "invalid_value", "custom_id"),
            (openai(custom_id="x" * 300), "invalid_value", "custom_id"),
            (openai(custom_id=1), "invalid_value", "custom_id"),
            (openai(custom_id="\x00"), "invalid_value", "custom_id"),
            (openai(custom_id="\ud800"), "invalid_value", "custom_id"),
            (openai(method=...), "missing_required_parameter", "method"),
            (openai(method="GET"), "invalid_value", "method"),
            (openai(url="/v1/images"), "invalid_value", "url"),
            (openai(body=...), "missing_required_parameter", "body"),
            (openai(body=[]), "invalid_value", "body"),
            (openai(prompt="p"), "unknown_parameter", "prompt"),
            (openai(body={**BODY, "custom_id": "a"}), "unknown_parameter", "custom_id"),
            ({}, "missing_required_parameter", "prompt"),
            ({"prompt": 5}, "invalid_value", "prompt"),
            ({"prompt": ""}, "invalid_value", "prompt"),
            ({"prompt": "p", "seconds": "long"}, "invalid_value", "seconds"),
            ({"prompt": "p", "webhook_url": "https://example.com"}, "unsupported_input", "webhook_url"),
            ({"prompt": "p", "not_before": 1}, "unsupported_input", "not_before"),
            ({"prompt": "p", "model": "other"}, "model_not_found", "model"),
            ({"prompt": "p", "output": {"bucket": "theirs"}}, "invalid_value", "output.bucket"),
        ],
    )
    def test_what_is_wrong_is_told_by_code_and_param(
        self, model: ServedModel, value: dict[str, Any], code: str, param: str
    ) -> None:
        found = resolve_line(value, Terms(model))
        assert isinstance(found, LineError)
        assert (found.code, found.param) == (code, param)

    def test_ids_are_compared_as_they_are_written(self, model: ServedModel) -> None:
        for custom_id in ("a ", "é", "e\u0301", "1", "007", "1E3", " "):
            found = resolve_line({**BODY, "custom_id": custom_id}, Terms(model))
            assert isinstance(found, Item)
            assert found.custom_id == custom_id

    def test_a_line_may_not_have_a_class_that_its_key_may_not(self, model: ServedModel) -> None:
        terms = Terms(model, priorities=["bulk"])
        found = resolve_line({**BODY, "priority": "interactive"}, terms)
        assert isinstance(found, LineError)
        assert (found.code, found.param) == ("priority_not_allowed", "priority")
        assert isinstance(resolve_line({**BODY, "priority": "bulk"}, terms), Item)
        assert isinstance(resolve_line(BODY, terms), Item)

    def test_defaults_lie_under_every_line(self, model: ServedModel) -> None:
        terms = Terms(model, defaults={"size": "832x480", "seed": 7, "metadata": {"client": "acme", "shot": "0"}})
        found = resolve_line({"prompt": "p", "seed": None, "metadata": {"shot": "1"}}, terms)
        assert isinstance(found, Item)
        assert (found.width, found.height, found.seed) == (832, 480, 7)
        assert json.loads(found.request)["metadata"] == {"client": "acme", "shot": "1"}
        assert terms.defaults["metadata"] == {"client": "acme", "shot": "0"}

    @pytest.mark.parametrize(
        ("defaults", "body", "merged"),
        [
            ({"seconds": 4}, {"num_frames": 124}, {"num_frames": 124}),
            ({"num_frames": 124}, {"seconds": 4}, {"seconds": 4}),
            (
                {"seconds": 4, "target": {"short_edge": 480}},
                {"target": {"duration_seconds": 5}},
                {"target": {"short_edge": 480, "duration_seconds": 5}},
            ),
            ({"size": "832x480"}, {"target": {"short_edge": 768}}, {"target": {"short_edge": 768}}),
            ({"target": {"short_edge": 768}}, {"size": "832x480"}, {"size": "832x480", "target": {}}),
            ({"seconds": 4}, {"seconds": None, "seed": 1}, {"seconds": 4, "seed": 1}),
        ],
    )
    def test_a_line_says_it_in_its_own_words(
        self, defaults: dict[str, Any], body: dict[str, Any], merged: dict[str, Any]
    ) -> None:
        assert merge(defaults, body) == merged


def _bodies(model: ServedModel) -> Iterator[dict[str, Any]]:
    """Requests of every kind, good and bad, mostly near a limit."""
    chance = random.Random(8)
    prompts: list[Any] = [
        "a ship",
        "é" * 50,
        "日本語の海",
        "\u212bngstr\u00f6m \ufb01",
        "x" * 9_000,
        "word " * 3_000,
        "\u0958" * 4_000,
        "🎬" * 3_000,
        "a\x00b",
        "\ud800",
        "\u3164",
        "",
        " ",
        "<|im_start|>",
        "<|im_start",
        "<d>hello</d>",
        7,
        None,
    ]
    fields: dict[str, list[Any]] = {
        "seconds": [4, "5", 15, 3.9, "long", True, "4.25"],
        "num_frames": [107, 124, 96, 95, 400, "124"],
        "size": ["832x480", "1280x720", "1x1", 5],
        "seed": [0, 2**63 - 1, 2**63, -1, "1", 1.0],
        "metadata": [{}, {"a": "b"}, {"a": 1}, {"k" * 65: "v"}, [], {"a": "\x00"}, {"é": "ü"}],
        "priority": ["bulk", "interactive", 50, 101, "urgent"],
        "target": [{"short_edge": 480}, {"duration_seconds": 5}, {"short_edge": 1}, {"odd": 1}],
        "retention": [{"seconds": 3_600}, {"seconds": 1}],
        "output": [{"thumbnail": True}, {"bucket": "other"}, {"key_prefix": "../x"}],
        "fps": [24, 25, "24"],
        "task": ["t2va", "fl2va"],
        "model": [model.name, "other"],
        "unknown": [1],
        "negative_prompt": ["", "no"],
    }
    for _ in range(4_000):
        body = {"prompt": chance.choice(prompts)}
        for name in chance.sample(list(fields), chance.choice([0, 0, 1, 1, 2, 3])):
            body[name] = chance.choice(fields[name])
        yield body


def _outcome(body: dict[str, Any], model: ServedModel) -> ResolvedRequest | LineError:
    try:
        return resolve(body, model)
    except InvalidRequest as error:
        return LineError.of(error)


def test_a_line_is_judged_as_the_same_request_would_be(model: ServedModel) -> None:
    verdicts = {"taken": 0, "refused": 0}
    for body in _bodies(model):
        found = resolve_line(body, Terms(model))
        expected = _outcome(body, model)
        if isinstance(expected, LineError):
            assert found == expected, body
            verdicts["refused"] += 1
            continue
        assert isinstance(found, Item), (body, found)
        columns = expected.job_values(model)
        if body.get("seed") is None:
            columns["seed"] = found.seed
        for name in ("prompt", "seed", "width", "height", "num_frames"):
            assert getattr(found, name) == columns[name]
        assert json.loads(found.request) == columns["request"]
        verdicts["taken"] += 1
    assert min(verdicts.values()) > 500


def test_ids_of_jobs_rise_with_every_line() -> None:
    ids = video_ids()
    drawn = [next(ids) for _ in range(5_000)]
    assert drawn == sorted(set(drawn))
    ahead = "video_7ZZZZZZZZZ0000000000000000"
    after = video_ids(ahead)
    drawn = [next(after) for _ in range(3)]
    assert [ahead, *drawn] == sorted({ahead, *drawn})


def test_the_tiny_tokenizer_is_one_that_needs_not_take_prompts_apart(model: ServedModel) -> None:
    for prompt in ("a ship", "\u212bngstr\u00f6m \ufb01", "\u0958" * 10, "🎬 日本語", "<d>hi</d>"):
        bound = model.tokenizer.bound(prompt)
        assert bound is not None
        assert len(model.tokenizer.encode(prompt, max_tokens=10_000)) <= bound
