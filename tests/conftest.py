"""Fixtures that more than one tier uses. Nothing of the servers is imported or started until a test asks for it."""

pytest_plugins = ["support.stack"]
