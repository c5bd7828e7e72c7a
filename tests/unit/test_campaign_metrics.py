"""How far off forecasts were, as Prometheus is told."""

from datetime import UTC, datetime

import pytest
from rushes_api.campaign_metrics import Fulfilled, forecast_figures


def samples(*campaigns: Fulfilled) -> dict[tuple[str, ...], float]:
    """By name and labels."""
    return {
        (sample.name.removeprefix("rushes_campaign_eta_"), *sample.labels.values()): sample.value
        for family in forecast_figures(campaigns)
        for sample in family.samples
    }


def took(seconds: float, **told: tuple[float, float]) -> Fulfilled:
    """A campaign that took so long from each forecast on, of which so long was foreseen."""
    made = {name.removeprefix("at"): {"at": 0, "p50": p50, "p90": p90} for name, (p50, p90) in told.items()}
    return Fulfilled(made, datetime.fromtimestamp(seconds, UTC))


def test_errors_are_parts_of_what_was_foreseen() -> None:
    found = samples(*(took(100 + 10 * number, at10=(100, 150)) for number in range(11)))
    assert [found["error", "10", "p50", name] for name in ("0.1", "0.5", "0.9")] == pytest.approx([0.1, 0.5, 0.9])
    assert found["error", "10", "p90", "0.5"] == 0
    assert (found["late", "10", "p50"], found["late", "10", "p90"]) == (pytest.approx(10 / 11), pytest.approx(5 / 11))
    assert (found["campaigns", "10"], found["campaigns", "50"]) == (11, 0)


def test_one_campaign_is_enough_and_none_says_nothing() -> None:
    found = samples(took(50, at50=(100, 200)))
    assert found["error", "50", "p50", "0.1"] == found["error", "50", "p50", "0.9"] == -0.5
    assert samples() == {("campaigns", "10"): 0, ("campaigns", "50"): 0}


def test_what_was_to_be_over_at_once_is_counted_in_seconds() -> None:
    assert samples(took(3, at50=(0, 0)))["error", "50", "p50", "0.5"] == 3
