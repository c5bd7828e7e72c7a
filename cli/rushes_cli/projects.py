"""`rushes projects`: make, list and weigh projects, straight on the database."""

import argparse

from rushes_core import keys
from rushes_core.errors import RushesError
from rushes_core.models import Project
from sqlalchemy import select

from rushes_cli.operator import transaction
from rushes_cli.terminal import print_json, print_table


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `projects` with its actions."""
    parser = subparsers.add_parser("projects", help="make, list and weigh projects")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    create = actions.add_parser("create", help="make a project")
    create.add_argument("name", metavar="NAME", help="lower-case letters, digits and hyphens")
    create.add_argument("--weight", type=float, default=1.0, metavar="N", help="its share of the GPUs, default 1")
    create.set_defaults(run=_create)

    change = actions.add_parser("change", help="change the share of the GPUs that a project has")
    change.add_argument("name", metavar="NAME")
    change.add_argument("--weight", type=float, required=True, metavar="N", help="beside those of other projects")
    change.set_defaults(run=_change)

    listing = actions.add_parser("list", help="list projects")
    listing.set_defaults(run=_list)

    for action in (create, change, listing):
        action.add_argument("--json", action="store_true", help="print one JSON object a line")


def _create(arguments: argparse.Namespace) -> int:
    wanted = keys.parse(keys.NewProject, {"name": arguments.name, "weight": arguments.weight})
    with transaction() as session:
        project = session.execute(keys.create_project(**wanted.model_dump())).scalar_one_or_none()
    if project is None:
        raise RushesError(f"there is a project {wanted.name} already")
    if arguments.json:
        print_json(_describe(project))
    else:
        print(f"rushes projects: made {project.name}")
    return 0


def _change(arguments: argparse.Namespace) -> int:
    wanted = keys.parse(keys.ProjectChanges, {"weight": arguments.weight})
    with transaction() as session:
        project = session.execute(keys.change_project(arguments.name, wanted.model_dump())).scalar_one_or_none()
    if project is None:
        raise RushesError(f"no project {arguments.name}")
    if arguments.json:
        print_json(_describe(project))
    else:
        print(f"rushes projects: {project.name} has weight {project.weight:g}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with transaction() as session:
        projects = session.execute(select(Project).order_by(Project.name)).scalars().all()
    if arguments.json:
        for project in projects:
            print_json(_describe(project))
    else:
        rows = [(one.name, f"{one.weight:g}", f"{one.created_at:%Y-%m-%d %H:%M}") for one in projects]
        print_table(("PROJECT", "WEIGHT", "MADE"), rows)
    return 0


def _describe(project: Project) -> dict[str, object]:
    return {
        "id": project.name,
        "object": "project",
        "name": project.name,
        "weight": project.weight,
        "created_at": int(project.created_at.timestamp()),
    }
