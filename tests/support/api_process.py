"""The API as `rushes api` serves it, on a socket that is open already: `python -m rushes_core.starting
support.api_process FD`."""

import uvicorn
from rushes_api.server import Protocol, make_app


def main(arguments: list[str]) -> int:
    uvicorn.run(make_app, factory=True, fd=int(arguments[0]), http=Protocol, ws="none", access_log=False)
    return 0
