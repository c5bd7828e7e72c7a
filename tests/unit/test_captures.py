import pytest
from pydantic import ValidationError
from rushes_core.captures import CaptureShape, parse_capacities, parse_captures
from rushes_core.setting_rules import problems
from rushes_core.settings import Settings

CAPACITIES = (1024, 4096)


def test_capacities_are_put_in_order() -> None:
    assert parse_capacities(" 4096, 64,16384 ") == (64, 4096, 16384)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"1\.\.16 text capacities, got 0"),
        ("100", "multiples of 64, got '100'"),
        ("-64", "multiples of 64, got '-64'"),
        ("1k", "multiples of 64, got '1k'"),
        ("0", r"64\.\.16384, got 0"),
        ("16448", r"64\.\.16384, got 16448"),
        ("64,64", "64 is named twice"),
        (",".join(str(64 * i) for i in range(1, 18)), r"1\.\.16 text capacities, got 17"),
    ],
)
def test_capacities_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_capacities(text)


def test_a_shape_stands_for_all_capacities_or_for_one() -> None:
    assert parse_captures("", CAPACITIES) == ()
    assert parse_captures("1344x768x124, 480x832x107x4096", CAPACITIES) == (
        CaptureShape(1344, 768, 124, 1024),
        CaptureShape(1344, 768, 124, 4096),
        CaptureShape(480, 832, 107, 4096),
    )
    assert len(parse_captures("480x480x107x1024,480x480x107", CAPACITIES)) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1344x768", "got '1344x768'"),
        ("1344x768x124x1024x1", "got '1344x768x124x1024x1'"),
        ("1344x768x5s", "got '1344x768x5s'"),
        ("1280x720x124", "canvas 1280x720 of 1280x720x124 is not one of 1536x672, 1344x768"),
        ("1344x768x120", "120 frames of 1344x768x120 are not one of 107, 124"),
        ("1344x768x124x2048", "text capacity 2048 of 1344x768x124x2048 is not one of 1024, 4096"),
    ],
)
def test_shapes_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_captures(text, CAPACITIES)


@pytest.mark.parametrize(
    ("field", "value"), [("text_capacities", "100"), ("capture", "1344x768x124x64"), ("graph_bytes", -1)]
)
def test_settings_name_the_variable_that_is_wrong(field: str, value: object) -> None:
    required = {
        "database_url": "postgresql+psycopg://localhost/rushes",
        "redis_url": "redis://localhost",
        "s3_bucket": "clips",
        "checkpoint": "/checkpoint",
    }
    with pytest.raises(ValidationError) as refused:
        Settings(**required, **{field: value})  # type: ignore[arg-type]
    assert problems(refused.value, Settings).startswith(f"RUSHES_{field.upper()}: ")
