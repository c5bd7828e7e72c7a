"""The alerts and queries of docs/operations.md, on what a service tells and has."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rushes_api.job_histograms import ATTEMPTS, SECONDS
from rushes_core.models import Base
from rushes_core.settings import Settings
from sqlalchemy import text
from starlette.testclient import TestClient
from support.api import JobDriver

GUIDE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
STATEMENTS = [
    statement
    for block in re.findall(r"```sql\n(.*?)```", GUIDE, re.DOTALL)
    for statement in block.split(";\n")
    if statement.strip()
]

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
BOUNDS = {f"{bound:g}" for bound in (*ATTEMPTS, *SECONDS)}

_METRIC = re.compile(r"\brushes_[a-z_]+(?:\{([^}]*)\})?")
_SELECTOR = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')
_NO_METRICS = {"rushes_restored", "rushes_b"}


def named() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Every metric that the document names, with the selectors behind it: label, operator, value."""
    for found in _METRIC.finditer(GUIDE):
        name = found[0].partition("{")[0]
        if name not in _NO_METRICS:
            yield name, _SELECTOR.findall(found[1] or "")


def test_metrics_that_it_names_are_scraped_with_the_labels_that_it_asks_for(
    client: TestClient, driver: JobDriver
) -> None:
    driver.report_replica(model="tiny", state="busy")
    assert client.get("/readyz").status_code == 503
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    told: dict[str, list[dict[str, str]]] = {}
    for family in families:
        # what none was measured of has no samples
        for suffix in SUFFIXES.get(family.type, ("",)):
            told[family.name + suffix] = [one.labels for one in family.samples if one.name == family.name + suffix]
    wanted = list(named())
    assert len({name for name, _ in wanted}) > 8
    assert {name for name, _ in wanted} <= told.keys()
    for name, selectors in wanted:
        for label, operator, value in selectors:
            found = BOUNDS if label == "le" else {one[label] for one in told[name]}
            assert operator == "!=" or any(re.fullmatch(value, one) for one in found), (name, label, value, found)


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: " ".join(statement.split()[:2]))
def test_statements_that_it_shows_run(statement: str, driver: JobDriver) -> None:
    with driver.engine.connect() as connection, connection.begin() as transaction:
        if statement.startswith("ALTER ROLE"):
            connection.execute(text(STATEMENTS[STATEMENTS.index(statement) - 1]))
        connection.execute(text(statement.replace("%", "%%")))
        transaction.rollback()


def test_the_query_for_clips_that_the_store_must_have_names_them(
    client: TestClient, driver: JobDriver, api_settings: Settings, tmp_path: Path
) -> None:
    (query,) = re.findall(r'psql -Atc "(.*?)"', GUIDE, re.DOTALL)
    done = driver.complete(client.post("/v1/videos", json={"prompt": "a dog"}).json()["id"], b"clip", tmp_path)
    gone = driver.complete(client.post("/v1/videos", json={"prompt": "a dog"}).json()["id"], b"clip", tmp_path)
    client.delete(f"/v1/videos/{gone.id}").raise_for_status()
    with driver.engine.connect() as connection:
        keys = connection.scalars(text(query.replace("BUCKET", api_settings.s3_bucket))).all()
        elsewhere = connection.scalars(text(query)).all()
    assert done.result is not None
    assert done.result["key"] in keys
    assert not any(gone.id in key for key in keys)
    assert elsewhere == []


def test_tables_that_it_tells_to_read_are_the_tables(driver: JobDriver) -> None:
    read = set(re.findall(r"FROM (\w+)", GUIDE))
    assert read <= set(Base.metadata.tables)
