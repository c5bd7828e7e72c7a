"""The command `rushes`: every process of the system, and two commands that run all of them on one machine."""

import argparse
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rushes_core.errors import InvalidRequest, RushesError
from rushes_core.starting import importing

# a subcommand's own modules are imported when it runs: `rushes --version` needs neither torch nor a database driver
if TYPE_CHECKING:
    from rushes_core.settings import DatabaseSettings, Settings

DEFAULT_PORT = 8000

Loaded = TypeVar("Loaded")


_STATUSES = """\
exit status of every command: 0 it is done; 2 an option, an argument or a variable is wrong, and nothing was begun;
1 what was asked for is refused by API, database, store, checkpoint or machine, or failed; 130 Ctrl-C, 143 SIGTERM and
129 a hangup, but for what runs until it is stopped; 141 nobody reads what it prints"""


class UsageError(Exception):
    """What the operator gave is wrong: one line, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status, by the rule that `rushes --help` prints."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words)
    except KeyboardInterrupt:
        print("rushes: interrupted", file=sys.stderr)
        return 130


def _main(words: Sequence[str]) -> int:
    arguments = _parser(words).parse_args(words)
    return status_of(f"rushes {arguments.command}", lambda: arguments.run(arguments))


def status_of(program: str, run: Callable[[], int]) -> int:
    """The status that `run` returns, or that of what it raises, which is told in a line that begins with `program`."""
    try:
        status = run()
        sys.stdout.flush()
        return status
    except (UsageError, InvalidRequest) as error:
        # a request that the API refuses comes back as another error: this one was never sent
        problem, status = str(error), 2
    except (RushesError, ValueError) as error:
        problem, status = str(error), 1
    except OSError as error:
        if isinstance(error, BrokenPipeError) and not _is_read():
            return 141
        where = f"{error.filename}: " if error.filename else ""
        problem, status = f"{where}{error.strerror or error}", 1
    print(f"{program}: {problem}", file=sys.stderr)
    return status


def _is_read() -> bool:
    """Whether somebody still reads what is printed. If not, what is left of it goes nowhere."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    if not poller.poll(0):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False


def load_settings() -> "Settings":
    """The settings of the environment.

    Raises:
        UsageError: names every variable that is missing or wrong.
    """
    with importing():
        from rushes_core.settings import get_settings

    return _load(get_settings)


def load_database_settings() -> "DatabaseSettings":
    """Where the database is, according to the environment.

    Raises:
        UsageError: the variable is missing or wrong.
    """
    from rushes_core.settings import get_database_settings

    return _load(get_database_settings)


def _load(load: Callable[[], Loaded]) -> Loaded:
    from rushes_core.setting_rules import InvalidSettings

    warn_of_unknown_variables()
    try:
        return load()
    except InvalidSettings as error:
        raise UsageError(f"settings: {error}") from None


def warn_of_unknown_variables() -> None:
    """Say which variables of the environment look like settings and are none: a default is in force instead."""
    from rushes_core.settings import unknown_variables

    for name, nearest in unknown_variables(os.environ).items():
        advice = f"; did you mean {nearest}?" if nearest else ""
        print(f"rushes: warning: {name} is no setting and changes nothing{advice}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names: what the beginning of one means may change with a release. The parsers of
    its subcommands are of the same kind."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"allow_abbrev": False})


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="rushes",
        description="An asynchronous render queue for FastH3.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rushes {version('rushes')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="run everything on this machine until Ctrl-C")
    up.add_argument("--state", type=Path, default=Path(".state"), metavar="DIR", help="default: .state")
    up.add_argument("--port", type=_port, help=f"port of the API (default: {DEFAULT_PORT}, or a free one)")
    up.add_argument("--layout", default="r1s1", help="replicas and GPUs of each, as r1s1 (the default) or r2s4")
    up.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    up.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: a tiny one with random weights")
    up.set_defaults(run=_run("rushes_cli.up"))

    demo = commands.add_parser("demo", help="render one clip with a tiny random checkpoint, and stop")
    demo.add_argument("--prompt", default="Waves roll against a lighthouse at dusk while a gull calls")
    demo.add_argument("--seconds", default="5", help="4 to 15 (default 5)")
    demo.add_argument("--size", default="832x480", help="a served canvas (default 832x480)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: out")
    demo.add_argument("--state", type=Path, default=Path(".state/demo"), metavar="DIR", help="default: .state/demo")
    demo.add_argument("--layout", default="r1s1", help="default: r1s1")
    demo.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu", help="default: cpu")
    demo.set_defaults(run=_run("rushes_cli.demo"))

    for command in (up, demo):
        command.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)

    api = commands.add_parser("api", help="run the HTTP API")
    api.add_argument("--host", type=_host, default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    api.add_argument("--port", type=_port, default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}")
    api.add_argument("--workers", type=_workers, default=1, metavar="N", help="processes that share it (default 1)")
    api.set_defaults(run=_api)

    worker = commands.add_parser("worker", help="run a worker: replicas of the model on this machine's devices")
    worker.add_argument("--layout", help="replicas and GPUs of each (default r1s1, or that of the node that is joined)")
    worker.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    worker.add_argument("--nodes", type=int, help="machines that share the ranks of one replica: 1 (the default) or 2")
    worker.add_argument("--node-rank", type=int, help="which of them this is: 0, or 1 when it joins")
    worker.add_argument("--join", metavar="HOST", help="be the second node of the replica whose first node is HOST")
    worker.add_argument(
        "--weights",
        metavar="synthetic[:SEED]",
        help="random weights of the released sizes, drawn on the GPU, instead of the checkpoint's: clips are noise",
    )
    worker.set_defaults(run=_worker)

    commands.add_parser("dispatcher", help="wake workers and sweep lost leases").set_defaults(run=_dispatcher)

    commands.add_parser("deliver", help="deliver webhooks").set_defaults(run=_deliver)

    commands.add_parser("loader", help="load, close and finish campaigns").set_defaults(run=_loader)

    sweep = commands.add_parser("sweep", help="sweep once, or look for objects that no job points at")
    sweep.add_argument("--orphans", action="store_true", help="list orphans in the store instead")
    sweep.add_argument("--delete", action="store_true", help="with --orphans: remove them")
    sweep.set_defaults(run=_run("rushes_cli.sweep"))

    commands.add_parser("migrate", help="bring the database's schema to this release").set_defaults(run=_migrate)

    for name, summary in (
        ("campaign", "submit, watch and fetch thousands of clips"),
        ("workers", "list the replicas, and what they do"),
        ("projects", "make and list projects"),
        ("keys", "make, list, change, rotate and revoke API keys"),
        ("checkpoint", "make, inspect and verify checkpoint directories"),
        ("bench", "time clips, in a running service or on devices of this machine"),
    ):
        if words[:1] == [name]:
            with importing():
                module = import_module(f"rushes_cli.{name}")
            module.add_parser(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


def _run(module: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        with importing():
            loaded = import_module(module)
        status: int = loaded.run(arguments)
        return status

    return run


def _settings_of_service() -> "Settings":
    """For what runs until it is stopped: logging is on, and the database's schema serves this release."""
    settings = load_settings()

    with importing():
        from rushes_core.log import configure_logging
        from rushes_core.schema import check_schema

    configure_logging(settings.log_level, json=settings.log_json)
    check_schema(settings)
    return settings


def _api(arguments: argparse.Namespace) -> int:
    settings = _settings_of_service()

    with importing():
        from rushes_api.app import create_app
        from rushes_api.server import check_address, serve
        from rushes_core.served_model import ServedModel

    # what is wrong with it is one line here and a traceback in the server's start
    ServedModel.load(settings)
    check_address(arguments.host, arguments.port)
    try:
        app = create_app(settings)
    except ValueError as error:
        raise UsageError(f"settings: {error}") from None
    serve(app, host=arguments.host, port=arguments.port, workers=arguments.workers)
    return 0


def _worker(arguments: argparse.Namespace) -> int:
    settings = load_settings()

    if arguments.join is not None:
        with importing():
            from rushes_worker import node

        if arguments.weights is not None:
            raise UsageError("--weights is said to the first node, which tells this one")
        if arguments.node_rank not in (None, 1):
            raise UsageError(f"--node-rank {arguments.node_rank}: the node that joins is 1")
        if arguments.nodes not in (None, 2):
            raise UsageError(f"--nodes {arguments.nodes}: the node that joins is one of 2")
        return node.run(settings, join=arguments.join, device=arguments.device, layout=arguments.layout)
    if arguments.node_rank not in (None, 0):
        raise UsageError(f"--node-rank {arguments.node_rank}: every node but the first is started with --join HOST")

    with importing():
        from rushes_worker import launcher

    return launcher.run(
        settings,
        layout=arguments.layout or "r1s1",
        device=arguments.device,
        nodes=1 if arguments.nodes is None else arguments.nodes,
        weights=arguments.weights,
    )


def _dispatcher(arguments: argparse.Namespace) -> int:
    settings = _settings_of_service()

    with importing():
        from rushes_core import dispatcher

    return dispatcher.run(settings)


def _deliver(arguments: argparse.Namespace) -> int:
    settings = _settings_of_service()

    with importing():
        from rushes_core.webhooks.signing import WebhooksNotConfigured
        from rushes_worker.webhooks import process

    try:
        return process.run(settings)
    except WebhooksNotConfigured as error:
        raise UsageError(f"settings: {error}") from None


def _loader(arguments: argparse.Namespace) -> int:
    settings = _settings_of_service()

    with importing():
        from rushes_worker.campaigns import process

    return process.run(settings)


def _migrate(arguments: argparse.Namespace) -> int:
    with importing():
        from rushes_core.database import migrate
        from rushes_core.schema import current_revision, is_newer, move_fences_on

    settings = load_settings()
    with one_line_database_errors():
        found = current_revision(settings)
        if not is_newer(found):
            migrate(settings)
        move_fences_on(settings)
    if is_newer(found):
        print(f"rushes migrate: the schema is at revision {found} of a later release, which serves this one too")
    else:
        print("rushes migrate: the schema is at this release")
    return 0


@contextmanager
def one_line_database_errors() -> Iterator[None]:
    """For commands that end with the first of them: a database that is away is a line, not a traceback."""
    from psycopg.errors import UndefinedColumn, UndefinedTable
    from sqlalchemy.exc import DBAPIError

    try:
        yield
    except DBAPIError as error:
        if isinstance(error.orig, (UndefinedColumn, UndefinedTable)):
            raise RushesError("the database's schema is not that of this release: run `rushes migrate`") from None
        raise RushesError(f"database: {str(error.orig).splitlines()[0]}") from None


def _workers(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 64):
        raise argparse.ArgumentTypeError(f"workers must be in 1..64, got {text}")
    return int(text)


def _host(text: str) -> str:
    # an empty one is every address to a server, and to most people a variable that they forgot to set
    if not text:
        raise argparse.ArgumentTypeError("host must be a name or an address, got ''; 0.0.0.0 is every address")
    return text


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"port must be in 1..65535, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
