"""The CPU workers that deliver webhooks."""
