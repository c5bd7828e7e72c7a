"""The description of the API, as generators and people read it."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from rushes_api.app import create_app
from starlette.testclient import TestClient
from support.api import offline_settings
from support.checkpoints import tiny_checkpoint

API_MD = Path(__file__).parents[2] / "docs" / "api.md"
WITHOUT_KEY = {"healthz", "readyz", "get_jwks"}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("openapi"))
    with TestClient(create_app(offline_settings(checkpoint))) as client:
        served: dict[str, Any] = client.get("/openapi.json").json()
    return served


def operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in document["paths"].values():
        yield from path.values()


def resolved(document: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in value:
        return value
    found: Any = document
    for name in value["$ref"].removeprefix("#/").split("/"):
        found = found[name]
    return found | {name: one for name, one in value.items() if name != "$ref"}


def test_it_is_valid(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


def test_operations_have_the_names_of_their_functions(document: dict[str, Any]) -> None:
    names = Counter(operation["operationId"] for operation in operations(document))
    assert set(names.values()) == {1}
    assert {"create_video", "list_videos", "get_video", "delete_video", "cancel_video", "get_content"} <= set(names)


def test_everything_says_what_it_is(document: dict[str, Any]) -> None:
    tags = {tag["name"] for tag in document["tags"]}
    for operation in operations(document):
        name = operation["operationId"]
        assert set(operation["tags"]) <= tags, name
        for parameter in operation["parameters"]:
            about = resolved(document, parameter)
            assert about["description"], (name, about["name"])
        for status, response in operation["responses"].items():
            assert resolved(document, response)["description"], (name, status)


def test_lists_say_which_cursors_they_take(document: dict[str, Any]) -> None:
    for operation in operations(document):
        after = next((one for one in operation["parameters"] if one.get("name") == "after"), None)
        assert after is None or "pattern" in after["schema"], operation["operationId"]


def test_every_error_has_the_shape_that_is_served(document: dict[str, Any]) -> None:
    of_minimax = [
        one["operationId"]
        for path in document["paths"]
        if path.startswith("/v2/")
        for one in document["paths"][path].values()
    ]
    for operation in operations(document):
        errors = {status: one for status, one in operation["responses"].items() if status >= "400"}
        for status, response in errors.items():
            content = resolved(document, response)["content"]
            assert set(content) >= {"application/json"}, (operation["operationId"], status)
            if operation["operationId"] in of_minimax:
                assert content["application/json"]["schema"]["$ref"].endswith("/MiniMaxErrorBody")
            elif operation["operationId"] != "readyz":
                assert content["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
                assert content["application/problem+json"]["schema"]["$ref"].endswith("/Problem")


def test_every_answer_tells_the_id_of_the_request(document: dict[str, Any]) -> None:
    for operation in operations(document):
        for status, response in operation["responses"].items():
            assert "x-request-id" in resolved(document, response)["headers"], (operation["operationId"], status)


def test_whoever_needs_a_key_says_so_and_which_scope(document: dict[str, Any]) -> None:
    assert document["security"] == [{"bearer": []}]
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for operation in operations(document):
        is_open = operation["operationId"] in WITHOUT_KEY
        assert (operation.get("security") == []) is is_open
        assert ({"401", "403", "429"} <= set(operation["responses"])) is not is_open
        assert is_open or "scope" in operation["description"] or "Any API key" in operation["description"]


def test_bodies_come_in_every_form_that_is_read(document: dict[str, Any]) -> None:
    content = document["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "multipart/form-data", "application/x-www-form-urlencoded"}
    for media_type, body in content.items():
        schema = resolved(document, body["schema"])
        assert schema["properties"] == document["components"]["schemas"]["VideoRequest"]["properties"]
        assert ("metadata" in body.get("encoding", {})) is (media_type != "application/json")


def test_what_a_request_and_an_answer_call_alike_is_kept_apart(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    sent = schemas["VideoRequest"]["properties"]["output"]["anyOf"][0]["$ref"].rpartition("/")[2]
    answered = schemas["Video"]["properties"]["output"]["$ref"].rpartition("/")[2]
    assert "key_prefix" in schemas[sent]["properties"]
    assert "num_frames" in schemas[answered]["properties"]


def test_every_array_says_what_it_holds(document: dict[str, Any]) -> None:
    def arrays(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(value, dict):
            if "array" in (value["type"] if isinstance(value.get("type"), list) else [value.get("type")]):
                yield where, value
            for name, inner in value.items():
                yield from arrays(inner, f"{where}/{name}")

    without = [where for where, array in arrays(document["components"]["schemas"], "") if "items" not in array]
    assert without == []


def test_no_two_schemas_have_the_same_title(document: dict[str, Any]) -> None:
    titles = {name: schema.get("title", name) for name, schema in document["components"]["schemas"].items()}
    assert titles == {name: name for name in titles}


def test_bodies_of_one_operation_have_classes_of_their_own(document: dict[str, Any]) -> None:
    for operation in operations(document):
        bodies = operation.get("requestBody", {}).get("content", {}).values()
        assert len({body["schema"]["$ref"] for body in bodies}) == len(bodies), operation["operationId"]


def test_queries_that_are_read_are_described(document: dict[str, Any]) -> None:
    listed = document["paths"]["/v1/videos"]["get"]["parameters"]
    assert {"after", "limit", "order", "status"} <= {one.get("name") for one in listed}


def test_people_read_of_the_same_routes(document: dict[str, Any]) -> None:
    table = API_MD.read_text().partition("## Routes")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    told = {re.sub(r"{\w+}", "{}", path) for row in rows for path in re.findall(r"(/[\w/{}.-]*)", row)}
    # `/pause`, `/resume`
    last_words = {path for path in told if path.count("/") == 1}
    served = {re.sub(r"{\w+}", "{}", path) for path in document["paths"]}
    assert told - last_words <= served
    for path in served - told:
        parent, _, last = path.rpartition("/")
        siblings = {one for one in told if one.rpartition("/")[0] == parent}
        in_other_document = path.startswith("/v1/webhook_")
        assert in_other_document or (siblings and f"/{last}" in last_words), path
