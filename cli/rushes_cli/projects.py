"""`rushes projects`: make and list projects, straight on the database."""

import argparse

from rushes_core import keys
from rushes_core.errors import RushesError
from rushes_core.models import Project
from sqlalchemy import select

from rushes_cli.operator import print_json, print_table, transaction


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `projects` with its actions."""
    parser = subparsers.add_parser("projects", help="make and list projects")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    create = actions.add_parser("create", help="make a project")
    create.add_argument("name", metavar="NAME", help="lower-case letters, digits and hyphens")
    create.set_defaults(run=_create)

    listing = actions.add_parser("list", help="list projects")
    listing.set_defaults(run=_list)

    for action in (create, listing):
        action.add_argument("--json", action="store_true", help="print one JSON object a line")


def _create(arguments: argparse.Namespace) -> int:
    wanted = keys.parse(keys.NewProject, {"name": arguments.name})
    with transaction() as session:
        project = session.execute(keys.create_project(name=wanted.name)).scalar_one_or_none()
    if project is None:
        raise RushesError(f"there is a project {wanted.name} already")
    if arguments.json:
        print_json(_describe(project))
    else:
        print(f"rushes projects: made {project.name}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with transaction() as session:
        projects = session.execute(select(Project).order_by(Project.name)).scalars().all()
    if arguments.json:
        for project in projects:
            print_json(_describe(project))
    else:
        print_table(("PROJECT", "MADE"), [(one.name, f"{one.created_at:%Y-%m-%d %H:%M}") for one in projects])
    return 0


def _describe(project: Project) -> dict[str, object]:
    return {
        "id": project.name,
        "object": "project",
        "name": project.name,
        "created_at": int(project.created_at.timestamp()),
    }
