"""One door for every kind of body: JSON, multipart and URL-encoded forms."""

from typing import Annotated, Any, get_args, get_origin
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rushes_api.body import MAX_DEPTH, MAX_MEMBERS, parse_body
from rushes_api.errors import ApiError, UnsupportedMedia
from rushes_api.form import BOOLEANS, INTEGERS, OBJECTS, UploadedFile, assemble, split_name
from rushes_core.fields import Fields
from rushes_core.request import VideoRequest
from support.api import multipart

JSON = ["application/json"]
FORM = ["application/x-www-form-urlencoded"]


def parsed(body: bytes | str, content_types: list[str] = JSON) -> dict[str, Any]:
    return parse_body(body.encode() if isinstance(body, str) else body, content_types=content_types)


def parsed_parts(*parts: tuple[str, str | bytes], **options: Any) -> dict[str, Any]:
    body, headers = multipart(*parts, **options)
    return parsed(body, [headers["Content-Type"]])


def refused(body: bytes | str, content_types: list[str] = JSON) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(body, content_types)
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 300
    return caught.value


class TestJson:
    def test_an_object_is_taken_as_it_is(self) -> None:
        assert parsed('{"prompt": "😀", "seed": 9007199254740993, "seconds": 5.5, "metadata": {"a": "b"}}') == {
            "prompt": "😀",
            "seed": 9007199254740993,
            "seconds": 5.5,
            "metadata": {"a": "b"},
        }

    @pytest.mark.parametrize("charset", ["utf-8", "UTF-8", '"utf8"'])
    def test_its_charset_may_be_named(self, charset: str) -> None:
        assert parsed("{}", [f"Application/JSON; charset={charset}"]) == {}

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", "empty"),
            (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
            (b"[]", "must be a JSON object, got an array"),
            (b"null", "must be a JSON object, got null"),
            (b'"x"', "must be a JSON object, got a string"),
            (b"true", "must be a JSON object, got a boolean"),
            (b"1", "must be a JSON object, got a number"),
            (b"{", "not valid JSON"),
            (b'{"a": 1}x', "not valid JSON: Extra data at character 8"),
            (b"prompt=x", "not valid JSON"),
            (b'{"a": NaN}', "NaN, which is no JSON number"),
            (b'{"a": -Infinity}', "-Infinity, which is no JSON number"),
            (b'{"a": 1e999}', "too large a number"),
            (b'{"a": ' + b"9" * 5_000 + b"}", "a number of 5000 characters"),
            (b'{"a": 0.' + b"1" * 5_000 + b"}", "a number of 5002 characters"),
            (b'{"a": "\xff"}', "not valid UTF-8: byte 0xff at 7"),
            ('{"a": 1}'.encode("utf-16"), "not valid UTF-8"),
            (b'{"a": "\n"}', "not valid JSON"),
            (b"[" * 100_000, "nested more than"),
            (b'{"a":' * 100_000, "nested more than"),
            (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", "nested more than"),
        ],
        ids=lambda value: ascii(value)[:30],
    )
    def test_what_is_wrong_with_it_is_named(self, body: bytes, reason: str) -> None:
        error = refused(body)
        assert reason in str(error)
        assert error.code == "invalid_body"

    def test_nesting_up_to_the_limit_is_read(self) -> None:
        levels = MAX_DEPTH - 1
        assert "a" in parsed('{"a":' + "[" * levels + "]" * levels + "}")

    @pytest.mark.parametrize("body", ['{"prompt": 1, "prompt": 1}', '{"metadata": {"prompt": 1, "b": 2, "prompt": 3}}'])
    def test_a_duplicate_key_is_named(self, body: str) -> None:
        error = refused(body)
        assert (error.param, error.code) == ("prompt", "duplicate_parameter")

    def test_a_duplicate_key_that_cannot_be_encoded_is_escaped(self) -> None:
        assert refused(r'{"\ud800": 1, "\ud800": 1}').param == r"\ud800"

    @pytest.mark.parametrize("form", ["{%s}", '{"a": {%s}}', '{"a": [{%s}]}'])
    def test_too_many_members_are_refused_wherever_they_are(self, form: str) -> None:
        members = ",".join(f'"{i}": 1' for i in range(MAX_MEMBERS + 1))
        assert "more than the 256 members" in str(refused(form % members))


class TestContentType:
    @pytest.mark.parametrize(
        "content_types",
        [[], ["text/plain"], ["application/xml"], [""], ["json"], ["application/json", "application/json"], ["\xff"]],
        ids=str,
    )
    def test_another_one_is_refused_with_those_that_are_read(self, content_types: list[str]) -> None:
        error = refused('{"prompt": "x"}', content_types)
        assert isinstance(error, UnsupportedMedia)
        assert "supported: application/json, multipart/form-data, application/x-www-form-urlencoded" in str(error)

    def test_another_charset_is_refused(self) -> None:
        assert "send UTF-8" in str(refused("{}", ["application/json; charset=latin-1"]))

    def test_a_compressed_body_is_refused(self) -> None:
        with pytest.raises(UnsupportedMedia, match="gzip"):
            parse_body(b"x", content_types=JSON, content_encoding="gzip")

    def test_json_that_is_called_a_form_is_recognised(self) -> None:
        # what `curl -d` sends without a header
        error = refused('{"prompt": "a dog"}', FORM)
        assert isinstance(error, UnsupportedMedia)
        assert "send application/json" in str(error)


class TestMultipart:
    def test_fields_of_the_sdk_are_read(self) -> None:
        assert parsed_parts(
            ("prompt", "a dog\r\n--and a cat"),
            ("seconds", "5"),
            ("seed", "12"),
            ("metadata[client]", "acme"),
            ("metadata[a[b]]", ""),
            ("target[size][width]", "1"),
            ("conditions[]", "x"),
            ("conditions[]", "y"),
        ) == {
            "prompt": "a dog\r\n--and a cat",
            "seconds": "5",
            "seed": 12,
            "metadata": {"client": "acme", "a[b]": ""},
            "target": {"size": {"width": "1"}},
            "conditions": ["x", "y"],
        }

    def test_characters_that_a_name_escapes_are_restored(self) -> None:
        assert parsed_parts(("metadata[a%22b\\\\c%0A%41]", "x")) == {"metadata": {'a"b\\c\n%41': "x"}}

    def test_text_beyond_ascii_is_read(self) -> None:
        assert parsed_parts(("prompt", "犬😀"), ("metadata[犬]", "é")) == {"prompt": "犬😀", "metadata": {"犬": "é"}}

    def test_json_text_in_a_field_is_read(self) -> None:
        assert parsed_parts(("prompt", "{}"), ("metadata", '{"a": "b"}')) == {"prompt": "{}", "metadata": {"a": "b"}}
        assert parsed_parts(("seed", "12"), headers={"Content-Type": "application/json"}) == {"seed": 12}

    def test_the_text_of_a_field_is_what_the_field_holds(self) -> None:
        flat = {
            "seed": "7",
            "num_frames": "124",
            "priority": "50",
            "target[short_edge]": "480",
            "target[aspect_ratio]": "1:1",
            "target[duration_seconds]": "5.5",
            "retention[seconds]": "3600",
            "output[thumbnail]": "true",
            "output[key_prefix]": "12",
        }
        assert parsed_parts(*flat.items()) == {
            "seed": 7,
            "num_frames": 124,
            "priority": 50,
            "target": {"short_edge": 480, "aspect_ratio": "1:1", "duration_seconds": "5.5"},
            "retention": {"seconds": 3_600},
            "output": {"thumbnail": True, "key_prefix": "12"},
        }

    def test_every_field_that_a_form_must_convert_is_converted(self) -> None:
        fields = {name: field.annotation for name, field in VideoRequest.model_fields.items()}
        found = {int: set[tuple[str, ...]](), bool: set[tuple[str, ...]]()}
        objects = {"metadata"}
        for name, annotation in fields.items():
            for kind in get_args(annotation) or (annotation,):
                kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
                if isinstance(kind, type) and issubclass(kind, Fields):
                    objects.add(name)
                    for inner, field in kind.model_fields.items():
                        for one in get_args(field.annotation) or (field.annotation,):
                            one = get_args(one)[0] if get_origin(one) is Annotated else one
                            if one in found:
                                found[one].add((name, inner))
                elif kind in found:
                    found[kind].add((name,))
        # a number is one of the two things that a priority may be
        assert found == {int: set(INTEGERS) - {("priority",)}, bool: set(BOOLEANS)}
        assert objects == set(OBJECTS)

    @pytest.mark.parametrize("text", ["True", "1", "yes", "", " true"])
    def test_only_two_words_are_true_or_false(self, text: str) -> None:
        assert parsed_parts(("output[thumbnail]", text)) == {"output": {"thumbnail": text}}

    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("target", '{"short_edge": 480, "duration_seconds": 5.5}', {"short_edge": 480, "duration_seconds": 5.5}),
            ("retention", ' {"seconds": 3600}', {"seconds": 3_600}),
            ("output", '{"thumbnail": true}', {"thumbnail": True}),
            ("conditions", "[]", []),
            ("webhook_events", '["video.failed"]', ["video.failed"]),
        ],
    )
    def test_json_text_of_any_object_is_read(self, name: str, text: str, value: object) -> None:
        assert parsed_parts((name, text)) == {name: value}
        assert parsed(urlencode({name: text}), FORM) == {name: value}

    def test_broken_json_text_in_a_field_is_refused(self) -> None:
        body, headers = multipart(("metadata", '{"a": "b", "a": "c"}'))
        assert refused(body, [headers["Content-Type"]]).code == "duplicate_parameter"

    @pytest.mark.parametrize("text", ["１２", "12 ", "+12", "1e3", "12.0", "true", "", "0x1", "9" * 21])
    def test_only_ascii_digits_are_an_integer(self, text: str) -> None:
        assert parsed_parts(("seed", text)) == {"seed": text}

    @pytest.mark.parametrize(("text", "value"), [("12", 12), ("-1", -1), ("-0", 0), ("18446744073709551616", 2**64)])
    def test_integers_are_read_before_they_are_checked(self, text: str, value: int) -> None:
        assert parsed_parts(("seed", text)) == {"seed": value}

    def test_a_file_is_no_text(self) -> None:
        body = (
            b'--b\r\nContent-Disposition: form-data; name="input_reference"; filename="a\xff.png"\r\n'
            b"Content-Type: image/png\r\n\r\n\x89PNG\r\n--b--\r\n"
        )
        value = parsed(body, ["multipart/form-data; boundary=b"])["input_reference"]
        assert isinstance(value, UploadedFile)
        assert (value.content, value.content_type) == (b"\x89PNG", "image/png")
        assert ascii(value) == r"the file 'a\ufffd.png'"

    def test_a_form_without_fields_is_empty(self) -> None:
        assert parsed_parts() == {}

    @pytest.mark.parametrize("names", [("seed", "seed"), ("metadata[a]", "metadata[a]"), ("metadata[a]", "metadata")])
    def test_a_duplicate_field_is_named(self, names: tuple[str, str]) -> None:
        body, headers = multipart(*((name, "1") for name in names))
        error = refused(body, [headers["Content-Type"]])
        assert (error.param, error.code) == (names[-1], "duplicate_parameter")

    @pytest.mark.parametrize(
        "names", [("metadata", "metadata[a]"), ("metadata[]", "metadata[a]"), ("metadata[a]", "metadata[]")]
    )
    def test_a_field_is_a_value_or_a_map_or_a_list(self, names: tuple[str, str]) -> None:
        body, headers = multipart(*((name, "1") for name in names))
        assert "both as a value and as a map or list" in str(refused(body, [headers["Content-Type"]]))

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            (b"", "empty"),
            (b"hello", "malformed"),
            (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx', "ends before its last boundary"),
            (b"--b\r\n\r\nx\r\n--b--\r\n", "lacks `Content-Disposition"),
            (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", "lacks `Content-Disposition"),
            (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--b--\r\n', "not valid UTF-8"),
            (b'--b\r\nContent-Disposition: form-data; name="\xff"\r\n\r\nx\r\n--b--\r\n', "not valid UTF-8"),
            (b'{"prompt": "x"}', "looks like JSON"),
        ],
        ids=lambda value: ascii(value)[:40],
    )
    def test_what_is_wrong_with_it_is_named(self, body: bytes, reason: str) -> None:
        assert reason in str(refused(body, ["multipart/form-data; boundary=b"]))

    def test_a_missing_boundary_is_named(self) -> None:
        assert "boundary" in str(refused(b"x", ["multipart/form-data"]))

    @pytest.mark.parametrize("name", ["Content-Transfer-Encoding", "Content-Type"])
    def test_an_encoding_that_is_not_undone_is_refused(self, name: str) -> None:
        value = "base64" if name == "Content-Transfer-Encoding" else "text/plain; charset=utf-16"
        body, headers = multipart(("prompt", "x"), headers={name: value})
        assert "not supported" in str(refused(body, [headers["Content-Type"]]))

    def test_too_many_fields_are_refused(self) -> None:
        body, headers = multipart(*((str(i), "x") for i in range(MAX_MEMBERS + 1)))
        assert "more than the 256 fields" in str(refused(body, [headers["Content-Type"]]))

    def test_nesting_is_bounded(self) -> None:
        body, headers = multipart(("a" + "[b]" * 100, "x"))
        assert "nested more than" in str(refused(body, [headers["Content-Type"]]))


class TestUrlencoded:
    def test_it_is_read_as_the_other_forms_are(self) -> None:
        body = "prompt=a+dog+%F0%9F%98%80&seed=12&metadata%5Ba%5D=b&seconds="
        assert parsed(body, FORM) == {"prompt": "a dog 😀", "seed": 12, "metadata": {"a": "b"}, "seconds": ""}

    @pytest.mark.parametrize("body", [b"hello", b"a=%ff", b"\xff=1", b"a=1&&b=2", b"a=1&a=2"], ids=ascii)
    def test_what_is_malformed_or_ambiguous_is_refused(self, body: bytes) -> None:
        assert refused(body, FORM).code in ("invalid_body", "duplicate_parameter")

    def test_too_many_fields_are_refused(self) -> None:
        fields = [f"a{number}=1" for number in range(MAX_MEMBERS + 1)]
        assert "more than the 256 fields" in str(refused("&".join(fields), FORM))
        assert len(parsed("&".join(fields[:-1]), FORM)) == MAX_MEMBERS


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("prompt", ["prompt"]),
        ("a[b]", ["a", "b"]),
        ("a[b][c]", ["a", "b", "c"]),
        ("a[]", ["a", ""]),
        ("a[b[c]]", ["a", "b[c]"]),
        ("a[b", ["a[b"]),
        ("a[b]c", ["a[b]c"]),
        ("a]b[", ["a]b["]),
        ("[a]", ["[a]"]),
        ("", [""]),
    ],
)
def test_names_are_split_at_balanced_brackets(name: str, path: list[str]) -> None:
    assert split_name(name) == path


@given(st.lists(st.tuples(st.text(st.sampled_from("ab[]"), max_size=8), st.text(max_size=3)), max_size=6))
def test_no_combination_of_names_is_lost_in_silence(items: list[tuple[str, str]]) -> None:
    try:
        members = assemble(items, parse_json=lambda text: text, max_depth=MAX_DEPTH)
    except ValueError:
        return
    assert _num_leaves(members) == len(items)


def _num_leaves(value: object) -> int:
    if isinstance(value, dict):
        return sum(_num_leaves(item) for item in value.values())
    return sum(_num_leaves(item) for item in value) if isinstance(value, list) else 1


@given(st.binary(max_size=300))
def test_no_multipart_body_does_anything_but_parse_or_be_refused(body: bytes) -> None:
    for data in (body, b'--b\r\nContent-Disposition: form-data; name="a"\r\n' + body + b"\r\n--b--\r\n"):
        try:
            parsed(data, ["multipart/form-data; boundary=b"])
        except ApiError as error:
            str(error).encode()
