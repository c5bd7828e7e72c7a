"""A second node as a process of its own; see `support.worker_process`."""

from rushes_core.settings import get_settings
from rushes_worker import node


def main(arguments: list[str]) -> int:
    return node.run(get_settings(), join=arguments[0], device="cpu")
