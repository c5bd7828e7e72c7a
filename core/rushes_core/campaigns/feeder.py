"""Opens the jobs of campaigns a few at a time, and closes them again.

A job of a campaign waits with the hold `campaign`, which no claim sees. Whoever opens jobs of a campaign holds its lock
in the database, as `close_open` does: after that has run, none is opened until its transaction ends.
"""

from sqlalchemy import TextClause, text


def close_open(campaign_id: str) -> TextClause:
    """Have no more jobs of a campaign claimed or started, until the feeder opens some again; how many were closed.

    To be run in the transaction that pauses, cancels or changes the campaign, after the change itself. A job that a
    replica holds and has not started goes back to the campaign within about a second.
    """
    return text("SELECT close_open_jobs(:campaign)").bindparams(campaign=campaign_id)


def stop_running(campaign_id: str) -> TextClause:
    """Have the running attempts at a campaign's jobs given back to it, with nothing counted."""
    return _STOP_RUNNING.bindparams(campaign=campaign_id)


_STOP_RUNNING = text("""
UPDATE jobs SET stop_at = now()
WHERE campaign_id = :campaign AND state IN ('claimed', 'running') AND hold IS DISTINCT FROM 'campaign'
""")
