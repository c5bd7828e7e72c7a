"""What a launcher tells a supervisor on its command line, and what the supervisor answers with its exit status."""

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Self

from rushes_core.contract import InferenceContract

from rushes_worker.layout import Layout

EXIT_UNFIT = 78
"""The replica can never serve as it was asked to (EX_CONFIG): starting it again is of no use."""
EXIT_NAME_TAKEN = 75
"""Another replica that is up has the name (EX_TEMPFAIL)."""
MAX_REFUSAL_BYTES = 16_384
"""Of what it says about that, to the launcher: less than a pipe holds."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which replica of which layout this supervisor is, and what its ranks run on."""

    layout: Layout
    replica: int
    kind: str
    visible: tuple[str, ...]
    contract: InferenceContract
    """Of the checkpoint when the worker started."""
    nodes: int = 1
    """Machines that share the replica's ranks; this one runs the first of them."""
    again: bool = False
    """Whether the worker had a supervisor of this replica before, which ended."""

    def arguments(self) -> list[str]:
        """The command line that `parse` reads."""
        contract = json.dumps(asdict(self.contract))
        again = ["--again"] if self.again else []
        return [
            str(self.layout),
            str(self.replica),
            self.kind,
            ",".join(self.visible),
            contract,
            str(self.nodes),
            *again,
        ]

    @classmethod
    def parse(cls, arguments: list[str]) -> Self:
        parser = argparse.ArgumentParser(prog="rushes_worker.supervisor", allow_abbrev=False)
        parser.add_argument("layout", type=Layout.parse)
        parser.add_argument("replica", type=int)
        parser.add_argument("kind", choices=("cpu", "cuda"))
        parser.add_argument("visible")
        parser.add_argument("contract", type=_parse_contract)
        parser.add_argument("nodes", type=int)
        parser.add_argument("--again", action="store_true")
        found = parser.parse_args(arguments)
        visible = tuple(filter(None, found.visible.split(",")))
        return cls(found.layout, found.replica, found.kind, visible, found.contract, found.nodes, found.again)


def _parse_contract(text: str) -> InferenceContract:
    fields = json.loads(text)
    return InferenceContract(**fields | {"dmd_denoising_steps": tuple(fields["dmd_denoising_steps"])})
