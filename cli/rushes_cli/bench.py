"""`rushes bench`: how long clips take, in a running service or on devices of this machine."""

import argparse
from importlib import import_module
from typing import Any

from rushes_cli.main import Parser

ACTIONS = {
    "service": "clips of a running service, for clients that wait for them or at a rate of requests",
    "pipeline": "prompt to MP4 on cuda:0, with the time of every stage",
    "replica": "prompt to MP4 on one replica of several GPUs",
    "share": "one rank of a replica on one device, its collectives replaced by copies",
}


class _Action(Parser):
    """Learns its options from its module when it is the one that was asked for: only `service` does without torch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.module: str | None = None

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        if self.module is not None:
            module, self.module = self.module, None
            try:
                import_module(module).add_options(self)
            except ModuleNotFoundError as error:
                self.error(f"needs the extra worker: there is no module {error.name}")
        return super().parse_known_args(*arguments, **options)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("bench", help="time clips, in a running service or on devices of this machine")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Action)
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary)
        assert isinstance(action, _Action)
        action.module = f"rushes_cli.bench_{name}"
