"""Postgres, Valkey and SeaweedFS as child processes, for one machine without a container engine."""

from rushes_cli.stack.embedded import EmbeddedStack
from rushes_cli.stack.errors import StackError

__all__ = ["EmbeddedStack", "StackError"]
