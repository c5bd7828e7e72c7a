"""A worker as a process of its own, with what `rushes worker` says only in other words.

`python -m support.worker_process LAYOUT DEVICE NODES` runs one, `... join HOST:PORT` the node that joins another's. It
imports nothing that tests need and workers do not: every start would pay for it.
"""

import sys
from collections.abc import Sequence

from rushes_core.settings import get_settings


def main(arguments: Sequence[str]) -> int:
    if arguments[0] == "join":
        from rushes_worker import node

        return node.run(get_settings(), join=arguments[1], device="cpu")
    from rushes_worker import launcher

    layout, device, nodes = arguments
    return launcher.run(get_settings(), layout=layout, device=device, nodes=int(nodes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
