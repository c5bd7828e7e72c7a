"""Campaigns: many jobs that were sent as one file, held, counted and told of as one."""
