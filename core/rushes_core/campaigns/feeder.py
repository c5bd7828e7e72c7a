"""Statements that close what is open of a campaign, for whoever changes one. Nothing here executes.

A job of a campaign waits with the hold `campaign`, which no claim sees. Whoever opens jobs of a campaign holds its lock
in the database, as `close_open` does: after that has run, none is opened until its transaction ends. What a pause, a
window, a budget or any other limit costs therefore goes by the jobs that are open, not by those of the campaign.
`feeding` opens them.
"""

from sqlalchemy import TextClause, text, update
from sqlalchemy.sql.dml import ReturningUpdate

from rushes_core.campaigns.tables import Campaign


def live(*states: str, campaign: str = ":campaign") -> str:
    """Condition on jobs of a campaign that are open or leased, as their index has it."""
    listed = ", ".join(f"'{state}'" for state in states)
    return f"campaign_id = {campaign} AND state IN ({listed}) AND hold IS DISTINCT FROM 'campaign'"


def close_open(campaign_id: str) -> TextClause:
    """Have no more jobs of a campaign claimed or started, until the feeder opens some again; how many were closed.

    To be run in the transaction that pauses, cancels or changes the campaign, after the change itself. A job that a
    replica holds and has not started goes back to the campaign within about a second.
    """
    return text("SELECT close_open_jobs(:campaign)").bindparams(campaign=campaign_id)


def stop_running(campaign_id: str) -> TextClause:
    """Have the running attempts at a campaign's jobs given back to it, with nothing counted."""
    return _STOP_RUNNING.bindparams(campaign=campaign_id)


def resume(campaign_id: str) -> ReturningUpdate[Campaign]:
    """End a pause: the next pass of a feeder opens jobs again, if nothing else speaks against that."""
    return (
        update(Campaign)
        .where(Campaign.id == campaign_id)
        .values(paused_at=None, pause_reason=None, hold_reason=None)
        .execution_options(synchronize_session=False, populate_existing=True)
        .returning(Campaign)
    )


_STOP_RUNNING = text(f"UPDATE jobs SET stop_at = now() WHERE {live('claimed', 'running')}")
