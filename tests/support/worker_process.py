"""A worker as a process of its own, with what `rushes worker` says only in other words.

`python -m rushes_core.starting support.worker_process LAYOUT DEVICE NODES` runs one, and with
`support.joining_process HOST:PORT` the node that joins another's. Neither imports anything that tests need and workers
do not: every start would pay for it.
"""

from rushes_core.settings import get_settings
from rushes_worker import launcher


def main(arguments: list[str]) -> int:
    layout, device, nodes = arguments
    return launcher.run(get_settings(), layout=layout, device=device, nodes=int(nodes))
