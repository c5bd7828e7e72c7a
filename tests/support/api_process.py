"""The API as `rushes api` serves it, on a socket that is open already."""

from importlib import import_module

import uvicorn
from rushes_api.server import Protocol, make_app


def main(arguments: list[str]) -> int:
    """Serve on the descriptor that is the last argument; those before it are modules that change something first."""
    *modules, descriptor = arguments
    for module in modules:
        import_module(module)
    uvicorn.run(make_app, factory=True, fd=int(descriptor), http=Protocol, ws="none", access_log=False)
    return 0
