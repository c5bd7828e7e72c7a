"""`rushes campaign`: thousands of clips from one file, over HTTP, from submitting it to the clips on this disk."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from rushes_core.errors import InvalidRequest
from rushes_core.ids import is_campaign_id

from rushes_cli.campaigns import flags, manifest
from rushes_cli.campaigns.client import PATIENCE_SECONDS, Client, from_environment
from rushes_cli.campaigns.download import Fetcher, Rate, alone_in, fetch_all
from rushes_cli.campaigns.shown import (
    Line,
    bar,
    bytes_text,
    counts_text,
    describe,
    duration_text,
    items_text,
    plain,
    report_lines,
    status_words,
)
from rushes_cli.main import UsageError
from rushes_cli.signals import Interrupted, interruptible
from rushes_cli.terminal import print_json, print_table

POLL_SECONDS = 2.0
WATCH_PATIENCE_SECONDS = 3_600.0
"""How long `watch` waits for an API that is away."""
MAX_PARALLEL = 64
KEEP_CHECKED_SECONDS = 3_600
"""How long the file of a dry run is kept: the shortest that the API takes."""
SHOWN_ERRORS = 10
ENDED = ("completed", "failed", "cancelled", "expired")

OUTCOMES = {"completed": 0, "failed": 4, "cancelled": 5, "expired": 6}
SOME_FAILED = 3
"""Exit status of a campaign that completed with failed items, of a dry run that found bad lines, and of a download that
lacks clips."""
UNUSABLE = OUTCOMES["failed"]
_STATUSES = """\
exit status of watch and of submit --follow: 0 all items completed, 3 some did not, 4 the campaign failed as a whole,
5 cancelled, 6 expired; of submit --dry-run: 0 every line is good, 3 some are not, 4 none is, or the file is unreadable;
of download: 3 a clip is missing or the campaign goes on; others as `rushes --help` says"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `campaign` with its actions."""
    parser = subparsers.add_parser(
        "campaign",
        help="submit, watch and fetch thousands of clips",
        description="Speaks with the API at RUSHES_URL (default http://127.0.0.1:8000), with the key RUSHES_KEY: one "
        "with the scope batches, and for download with videos:read, too.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    submit = actions.add_parser(
        "submit", help="send a file of prompts: JSONL or CSV, also compressed by gzip", epilog=_STATUSES
    )
    submit.add_argument("file", type=Path, metavar="FILE")
    submit.add_argument("--name", help="default: the file's")
    _add_limits(submit)
    submit.add_argument(
        "--proof",
        type=_checked(flags.proof),
        metavar="N[:TIME]",
        help="run the first N, then wait for approve, at most TIME",
    )
    submit.add_argument("--max-attempts", type=_checked(flags.number), metavar="N", help="of each clip")
    submit.add_argument("--completion-window", metavar="TIME", help="what has not started by then expires, as 24h")
    submit.add_argument(
        "--default",
        type=_checked(flags.pair),
        action="append",
        dest="defaults",
        metavar="NAME=VALUE",
        help="for lines that do not say it, as size=1344x768; may be given again",
    )
    submit.add_argument(
        "--metadata", type=_checked(flags.pair), action="append", metavar="NAME=VALUE", help="may be given again"
    )
    submit.add_argument("--webhook-url", metavar="URL", help="told when it ends")
    submit.add_argument(
        "--format", choices=("jsonl", "csv"), dest="input_format", help="default: as the file's name says"
    )
    submit.add_argument("--strict", action="store_true", help="one bad line fails the whole file")
    submit.add_argument("--start-paused", action="store_true")
    submit.add_argument("--dry-run", action="store_true", help="check the file and say what it would take")
    submit.add_argument("--follow", action="store_true", help="then watch it")
    submit.set_defaults(act=_submit)

    status = actions.add_parser("status", help="show one")
    status.set_defaults(act=_status)
    watch = actions.add_parser("watch", help="follow one to its end", epilog=_STATUSES)
    watch.set_defaults(act=_watch)
    listing = actions.add_parser("list", help="list campaigns, the newest first")
    listing.add_argument("--limit", type=_checked(flags.number), default=20, metavar="N", help="default: 20")
    listing.add_argument("--dry-runs", action="store_true", help="list those of the last day instead")
    listing.set_defaults(act=_list)
    items = actions.add_parser("items", help="list the clips of one")
    items.add_argument(
        "--status", choices=("queued", "in_progress", "completed", "failed", "cancelled", "expired"), help="only these"
    )
    items.add_argument("--limit", type=_checked(flags.number), metavar="N", help="default: all")
    items.set_defaults(act=_items)
    pause = actions.add_parser("pause", help="start no more of it; what runs is finished")
    pause.add_argument("--stop", action="store_true", help="also stop what runs; it begins again at resume")
    pause.set_defaults(act=_pause)
    for name, summary in (
        ("resume", "go on with it"),
        ("approve", "go on after the proof"),
        ("cancel", "end it; what has ended stays"),
    ):
        action = actions.add_parser(name, help=summary)
        action.set_defaults(act=_ask(name))
    change = actions.add_parser(
        "change",
        help="change it while it runs; what is not named stays, and none takes a limit away",
        argument_default=argparse.SUPPRESS,
    )
    change.add_argument("--name")
    _add_limits(change)
    change.set_defaults(act=_change_limits)
    retry = actions.add_parser("retry-failed", help="queue failed clips again, in place")
    retry.add_argument("--code", action="append", dest="codes", metavar="CODE", help="only with it; may be given again")
    retry.add_argument("--include-cancelled", action="store_true", help="cancelled and expired ones, too")
    retry.add_argument("--new-seeds", action="store_true", help="each with another seed")
    retry.set_defaults(act=_retry)
    download = actions.add_parser(
        "download", help="have every clip in a directory; goes on where it was broken off", epilog=_STATUSES
    )
    for name, action in actions.choices.items():
        if name not in ("submit", "list"):
            action.add_argument("id", type=_campaign_id, metavar="CAMPAIGN", help="its id, batch_...")
    download.add_argument("folder", type=Path, metavar="DIR")
    download.add_argument(
        "--parallel", type=_checked(flags.number), default=4, metavar="N", help="clips at once (default 4)"
    )
    download.add_argument("--verify", action="store_true", help="read again what is here already")
    download.set_defaults(act=_download)
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", default=False, help="print JSON objects, one a line")
        action.set_defaults(run=_run)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """What may be said of a campaign when it is sent, and changed later."""
    parser.add_argument("--priority", choices=("interactive", "normal", "bulk"), help="default: bulk")
    for name, parse, metavar, summary in (
        ("window", flags.window, "WHEN", "when its clips may run: '22:00-06:00 mo-fr Europe/Berlin'"),
        ("budget", flags.budget, "TIME", "GPU time: seconds, or 25h; '25h,cancel' cancels the rest"),
        ("not-before", flags.moment, "WHEN", "2h, or 2026-12-01T22:00:00+01:00"),
        ("max-parallel", flags.number, "N", "clips that run at once"),
        ("max-failures", flags.number, "N", "failed clips after which it pauses"),
    ):
        parser.add_argument(f"--{name}", type=_checked(flags.or_none(parse)), metavar=metavar, help=summary)
    parser.add_argument("--on-failure", choices=("pause", "cancel"), help="what --max-failures does (default pause)")


def _run(arguments: argparse.Namespace) -> int:
    try:
        with interruptible():
            return arguments.act(arguments)
    except Interrupted as interruption:
        print("rushes campaign: interrupted", file=sys.stderr)
        return 128 + interruption.signum


@contextmanager
def _api(*, patience: float = PATIENCE_SECONDS, line: Line | None = None) -> Iterator[Client]:
    def on_wait(reason: str) -> None:
        text = f"waiting for the API: {reason}"
        if line is None:
            print(f"rushes campaign: {text}", file=sys.stderr)
        else:
            line.show(text, key="away")

    client = from_environment(patience=patience, on_wait=on_wait)
    try:
        yield client
    finally:
        client.close()


def _submit(arguments: argparse.Namespace) -> int:
    body = _request(arguments)
    path: Path = arguments.file
    if str(path) == "-":
        raise UsageError("a campaign is read from a file, which may be sent twice, not from standard input")
    if not path.is_file():
        raise UsageError(f"{path} is no file" if path.exists() else f"there is no file {path}")
    if path.stat().st_size == 0:
        raise UsageError(f"{path} is empty")
    # loads the database's libraries, which take half a second and which no other command needs
    from rushes_core.campaigns.options import CampaignRequest

    try:
        # before the file is sent, and by the rules of the API
        CampaignRequest.parse(body)
    except InvalidRequest as error:
        raise UsageError(str(error)) from error
    with Line(sys.stderr) as line, _api(line=line) as client:
        keep_seconds = KEEP_CHECKED_SECONDS if arguments.dry_run else None
        stored = client.upload(lambda: _Shown(path, line), name=path.name, keep_seconds=keep_seconds)
        campaign = client.post("/v1/campaigns", body | {"input_file_id": stored["id"]})
    if arguments.dry_run:
        return _report(arguments, campaign["id"])
    if arguments.json and not arguments.follow:
        print_json(campaign)
    elif not arguments.json:
        print(f"rushes campaign: {campaign['id']} {campaign['status']}")
    return _follow(arguments, campaign["id"]) if arguments.follow else 0


def _request(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("priority", "window", "budget", "proof", "max_parallel", "max_failures", "on_failure", "max_attempts")
    names += ("not_before", "completion_window", "webhook_url", "input_format")
    body = {name: getattr(arguments, name) for name in names}
    body |= {
        "name": arguments.name or arguments.file.name,
        "defaults": flags.defaults(arguments.defaults) if arguments.defaults else None,
        "metadata": dict(arguments.metadata) if arguments.metadata else None,
        "validate": "strict" if arguments.strict else None,
        "start_paused": arguments.start_paused or None,
        "dry_run": arguments.dry_run or None,
    }
    return {name: value for name, value in body.items() if value is not None}


class _Shown:
    """A file that shows how much of it was read, for the client that uploads it."""

    def __init__(self, path: Path, line: Line) -> None:
        self._file: IO[bytes] = path.open("rb")
        self._size, self._line, self._name = path.stat().st_size, line, path.name
        self._rate = Rate()

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._rate.add(len(piece))
        percent = 100 * self._rate.total / max(self._size, 1)
        text = f"{bar(percent)}  {self._name}: {bytes_text(self._rate.total)} of {bytes_text(self._size)}"
        self._line.show(f"{text}, {bytes_text(self._rate.value())}/s", key=int(percent / 10))
        return piece

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> "_Shown":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _report(arguments: argparse.Namespace, campaign_id: str) -> int:
    """What a dry run found, when it has read the whole file."""
    campaign = _until_ended(campaign_id, arguments)
    if arguments.json:
        print_json(campaign)
    else:
        _print_failure(campaign)
        for text in report_lines(campaign["report"] or {}):
            print(text)
    return _verdict(campaign)


def _verdict(campaign: dict[str, Any]) -> int:
    """Exit status of a dry run."""
    report: dict[str, Any] = campaign["report"] or {}
    if campaign["status"] != "completed" or not report.get("invalid"):
        return OUTCOMES[campaign["status"]]
    return SOME_FAILED if report["valid"] else UNUSABLE


def _status(arguments: argparse.Namespace) -> int:
    with _api() as client:
        campaign = _get(client, arguments.id)
    if arguments.json:
        print_json(campaign)
        return 0
    print(f"{campaign['id']}  {plain(campaign.get('name') or '')}".rstrip())
    print(describe(campaign))
    budget, proof = campaign["budget"], campaign.get("proof")
    most = f" of {duration_text(budget['gpu_seconds'])}" if budget["gpu_seconds"] is not None else ""
    print(f"GPU     {duration_text(budget['used_gpu_seconds'])}{most}")
    if proof:
        print(f"proof   the first {proof['count']}: {proof['state'].replace('_', ' ')}")
    for name in ("output_file_id", "error_file_id"):
        if campaign.get(name):
            print(f"{name.removesuffix('_file_id'):<7} {campaign[name]}")
    _print_failure(campaign)
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    return _follow(arguments, arguments.id)


def _follow(arguments: argparse.Namespace, campaign_id: str) -> int:
    campaign = _until_ended(campaign_id, arguments)
    if arguments.json:
        print_json(campaign)
    else:
        _print_failure(campaign)
        print(f"{campaign['id']} {campaign['status']}: {counts_text(campaign['request_counts'])}")
    counts = campaign["request_counts"]
    if campaign["status"] == "completed" and counts["completed"] < counts["total"]:
        return SOME_FAILED
    return OUTCOMES[campaign["status"]]


def _until_ended(campaign_id: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The campaign, once it has ended, shown as it goes on."""
    with (
        Line(sys.stderr if arguments.json else sys.stdout) as line,
        _api(patience=WATCH_PATIENCE_SECONDS, line=line) as client,
    ):
        while True:
            campaign = _get(client, campaign_id)
            key = (status_words(campaign), campaign["progress"], campaign["request_counts"]["failed"])
            line.show(status_words(campaign) if campaign["dry_run"] else describe(campaign), key=key)
            if campaign["status"] in ENDED and not campaign.get("retrying"):
                return campaign
            time.sleep(POLL_SECONDS)


def _list(arguments: argparse.Namespace) -> int:
    with _api() as client:
        # one more, to know whether there are more
        chosen = "true" if arguments.dry_runs else None
        pages = client.pages("/v1/campaigns", limit=min(arguments.limit + 1, 100), dry_run=chosen)
        found = list(islice(pages, arguments.limit + 1))
    has_more = len(found) > arguments.limit
    found = found[: arguments.limit]
    if arguments.json:
        for campaign in found:
            print_json(campaign)
        return 0
    rows = [
        (
            one["id"],
            status_words(one),
            f"{one['progress']} %",
            items_text(one),
            plain(one.get("name") or ""),
        )
        for one in found
    ]
    print_table(("CAMPAIGN", "STATUS", "DONE", "ITEMS", "NAME"), rows)
    if has_more:
        print("rushes campaign: there are older ones: --limit shows more", file=sys.stderr)
    return 0


def _items(arguments: argparse.Namespace) -> int:
    count = 0
    with _api() as client:
        limit = 100 if arguments.limit is None else min(arguments.limit, 100)
        for item in client.pages(f"/v1/campaigns/{arguments.id}/items", status=arguments.status, limit=limit):
            if arguments.json:
                print_json(item)
            else:
                print(_item_text(item))
            count += 1
            if count == arguments.limit:
                break
    return 0


def _item_text(item: dict[str, Any]) -> str:
    error: dict[str, Any] = item.get("error") or {}
    why = plain(f"{error.get('code')}: {error.get('message')}") if error else ""
    cells = (f"{item.get('line') or '':>7}", f"{item['status']:<11}", f"{plain(item.get('custom_id') or '-'):<24}")
    return "  ".join((*cells, f"{item.get('video_id') or '-':<32}", why)).rstrip()


def _pause(arguments: argparse.Namespace) -> int:
    return _change(arguments, "pause", {"drain": False} if arguments.stop else {})


def _ask(name: str) -> Callable[[argparse.Namespace], int]:
    return lambda arguments: _change(arguments, name, {})


def _change_limits(arguments: argparse.Namespace) -> int:
    names = ("name", "priority", "window", "budget", "not_before", "max_parallel", "max_failures", "on_failure")
    members = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if not members:
        raise UsageError("change: name something to change, as --priority normal")
    with _api() as client:
        return _print_changed(arguments, client.patch(f"/v1/campaigns/{arguments.id}", members))


def _retry(arguments: argparse.Namespace) -> int:
    asked = {
        "codes": arguments.codes,
        "include_cancelled": arguments.include_cancelled or None,
        "new_seeds": arguments.new_seeds or None,
    }
    return _change(arguments, "retry_failed", {name: value for name, value in asked.items() if value is not None})


def _change(arguments: argparse.Namespace, action: str, members: dict[str, Any]) -> int:
    with _api() as client:
        return _print_changed(arguments, client.post(f"/v1/campaigns/{arguments.id}/{action}", members))


def _print_changed(arguments: argparse.Namespace, campaign: dict[str, Any]) -> int:
    if arguments.json:
        print_json(campaign)
    else:
        print(f"{campaign['id']} {status_words(campaign)}: {counts_text(campaign['request_counts'])}")
    return 0


def _download(arguments: argparse.Namespace) -> int:
    if arguments.parallel > MAX_PARALLEL:
        raise UsageError(f"--parallel must be at most {MAX_PARALLEL}, got {arguments.parallel}")
    folder: Path = arguments.folder
    if (other := manifest.owner(folder)) not in (None, arguments.id):
        raise UsageError(f"{folder} has the clips of {other}: give each campaign a directory of its own")
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        line = stack.enter_context(Line(sys.stderr))
        client = stack.enter_context(_api(line=line))
        campaign = _get(client, arguments.id)
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(alone_in(folder))
        manifest.renew(client, arguments.id, folder)
        statuses, total_bytes = manifest.survey(folder)
        rate = Rate()
        fetcher = Fetcher(client, folder, on_bytes=rate.add)
        missing = [one for one in manifest.clips(folder) if not fetcher.is_here(one, verify=arguments.verify)]
        num_clips, here = statuses["clip"], statuses["clip"] - len(missing)
        here_bytes = total_bytes - sum(one.bytes for one in missing)

        def show() -> None:
            percent = 100 * here / max(num_clips, 1)
            text = f"{bar(percent)}  {here:,} of {num_clips:,} clips, {bytes_text(rate.total)}"
            line.show(f"{text}, {bytes_text(rate.value())}/s", key=int(percent / 10))

        for clip, reason in fetch_all(fetcher, missing, parallel=arguments.parallel, tick=show):
            if reason is None:
                here += 1
                here_bytes += clip.bytes
            else:
                failures[clip.name] = reason
            show()
        manifest.save_table(client, arguments.id, folder)
    is_over = campaign["status"] in ENDED
    result = {
        "id": arguments.id,
        "status": campaign["status"],
        "folder": str(folder),
        "clips": num_clips,
        "here": here,
        "fetched_bytes": rate.total,
        "here_bytes": here_bytes,
        "bytes": total_bytes,
        "failed": statuses["failed"],
        "not_finished": statuses["open"],
        "missing": failures,
    }
    if arguments.json:
        print_json(result)
    else:
        _print_download(result)
    return 0 if here == num_clips and is_over else SOME_FAILED


def _print_download(result: dict[str, Any]) -> None:
    for name, reason in list(result["missing"].items())[:SHOWN_ERRORS]:
        print(f"missing {name}: {reason}")
    amount = bytes_text(result["here_bytes"])
    if result["here"] < result["clips"]:
        amount += f" of {bytes_text(result['bytes'])}"
    print(f"{result['here']:,} of {result['clips']:,} clips are in {result['folder']} ({amount})")
    if result["failed"]:
        print(f"{result['failed']:,} items have no clip: manifest.csv says why")
    if result["not_finished"]:
        print(f"{result['not_finished']:,} items are not finished: run the same command again")


def _get(client: Client, campaign_id: str) -> dict[str, Any]:
    return client.get(f"/v1/campaigns/{campaign_id}")


def _print_failure(campaign: dict[str, Any]) -> None:
    for error in ((campaign.get("errors") or {}).get("data") or [])[:SHOWN_ERRORS]:
        where = f"line {error['line']}: " if error.get("line") else ""
        print(plain(f"{where}{error.get('message')} ({error.get('code')})"))


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None

    return checked


def _campaign_id(text: str) -> str:
    if not is_campaign_id(text):
        raise argparse.ArgumentTypeError(f"must be the id of a campaign, batch_ and 26 characters, got {text!r}")
    return text
