"""From a parsed body to the fields of a model, or to what is wrong with it in our own words."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rushes_core.errors import InvalidRequest
from rushes_core.fields import Fields, is_storable, printable, shown

Kind = TypeVar("Kind", bound=Fields)


class InvalidFields(InvalidRequest):
    """Several fields are wrong; `details` has one entry for each."""

    def __init__(self, first: InvalidRequest, details: list[dict[str, Any]]) -> None:
        super().__init__(str(first), param=first.param, code=first.code)
        self.details = details


def parse_as(kind: type[Kind], body: Mapping[str, Any]) -> Kind:
    """The body as the fields of `kind`.

    Raises:
        InvalidRequest: the first thing that is wrong; an `InvalidFields` when there are several.
    """
    garbled = next((name for name in body if not is_storable(name)), None)
    if garbled is not None:
        raise InvalidRequest(
            f"unknown parameter: {printable(garbled)}", param=printable(garbled), code="unknown_parameter"
        )
    try:
        return kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        raise refusal(error) from error


def refusal(error: ValidationError) -> InvalidRequest:
    """What is wrong with a body that does not fit its model; an `InvalidFields` when there are several faults."""
    found = [_to_error(detail) for detail in error.errors(include_input=True, include_url=False)]
    if len(found) == 1:
        return found[0]
    return InvalidFields(found[0], [{"loc": [f.param], "msg": str(f), "code": f.code} for f in found])


def _to_error(detail: ErrorDetails) -> InvalidRequest:
    param = printable(".".join(str(part) for part in detail["loc"]))
    kind = detail["type"]
    if kind == "extra_forbidden":
        return InvalidRequest(f"unknown parameter: {param}", param=param, code="unknown_parameter")
    if kind == "missing":
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    code = kind if kind == "unsupported_size" else "invalid_value"
    message = detail["msg"] if kind in ("invalid_value", "unsupported_size") else _sentence(detail)
    return InvalidRequest(f"{param} {message}", param=param, code=code)


def _sentence(detail: ErrorDetails) -> str:
    if detail["type"] == "model_type":
        return f"must be an object, got {shown(detail['input'])}"
    message = detail["msg"].removeprefix("Input ").removeprefix("should be ")
    return f"must be {message}, got {shown(detail['input'])}"


def unsupported(name: str, reason: str) -> InvalidRequest:
    """The refusal of an input that exists elsewhere."""
    return InvalidRequest(f"{name} is not supported: {reason}", param=name, code="unsupported_input")
