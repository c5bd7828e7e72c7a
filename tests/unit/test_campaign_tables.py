"""Reading a campaign's table: delimiters, quotes, columns and cells."""

import pytest
from rushes_core.campaigns.lines import (
    FileUnreadable,
    LineError,
    format_of,
)
from support.campaign_lines import PIECES, records, values


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
