"""What tests of feeders look at and change."""

from typing import Any

from rushes_core.campaigns import feeder
from rushes_core.models import Job
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session
from support.campaign_rows import CampaignRows

AGO = func.now() - text("interval '1 minute'")


def campaigns(engine: Engine) -> list[str]:
    with engine.begin() as connection:
        return list(connection.execute(text("SELECT id FROM campaigns")).scalars())


def num_live(engine: Engine, campaign: str) -> int:
    found = select(func.count()).where(
        Job.campaign_id == campaign,
        Job.state.in_(("queued", "claimed", "running")),
        Job.hold.is_distinct_from("campaign"),
    )
    with Session(engine) as session:
        return session.scalars(found).one()


def change_and_close(rows: CampaignRows, campaign: str, **values: Any) -> None:
    """What a request does that pauses or changes a campaign."""
    with rows.engine.begin() as connection:
        sets = ", ".join(f"{name} = {value}" for name, value in values.items())
        connection.execute(text(f"UPDATE campaigns SET {sets} WHERE id = :id"), {"id": campaign})
        connection.execute(feeder.close_open(campaign))
