"""How far off the forecasts of completed campaigns were, for Prometheus."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import quantiles
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from rushes_core.campaigns import foresight

NUM_CAMPAIGNS = 100
"""The last completed ones, of which is told."""
_DECILES = {"0.1": 0, "0.5": 4, "0.9": 8}
_FORECASTS = ("p50", "p90")


@dataclass(frozen=True, slots=True)
class Fulfilled:
    """What was foreseen of a campaign, as `CampaignForecast.told`, and when it was done."""

    told: dict[str, Any]
    ended_at: datetime

    def error(self, done: str, forecast: str) -> float | None:
        """By how much of the time that was foreseen it took longer; None: nothing was foreseen then."""
        made = self.told.get(done)
        if made is None:
            return None
        return (self.ended_at.timestamp() - made[forecast]) / max(1.0, made[forecast] - made["at"])


def forecast_figures(campaigns: Sequence[Fulfilled]) -> Iterable[Metric]:
    labels = ["done", "forecast"]
    errors = GaugeMetricFamily(
        "rushes_campaign_eta_error",
        "By how much of the time that was foreseen the last completed campaigns took longer; below 0: shorter",
        labels=[*labels, "quantile"],
    )
    late = GaugeMetricFamily("rushes_campaign_eta_late", "Which part of them took longer at all", labels=labels)
    counts = GaugeMetricFamily("rushes_campaign_eta_campaigns", "How many they are", labels=labels[:1])
    for milestone in map(str, foresight.MILESTONES):
        counts.add_metric([milestone], sum(milestone in one.told for one in campaigns))
        for forecast in _FORECASTS:
            found = [error for one in campaigns if (error := one.error(milestone, forecast)) is not None]
            if not found:
                continue
            deciles = quantiles(found, n=10, method="inclusive") if len(found) > 1 else found * 9
            for name, place in _DECILES.items():
                errors.add_metric([milestone, forecast, name], deciles[place])
            late.add_metric([milestone, forecast], sum(error > 0 for error in found) / len(found))
    return errors, late, counts
