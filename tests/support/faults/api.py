"""The API on a canvas small enough for a few dozen clips a minute, with the faults of the environment."""

import os

import uvicorn
from fastapi import FastAPI
from rushes_api import app
from support.faults import canvas  # noqa: F401
from support.faults.mutants import commit_after_answer, install

COMMIT_AFTER_ANSWER = "commit after answer"


def create_app() -> FastAPI:
    install()
    if os.environ.get("FAULT_MUTANT") == COMMIT_AFTER_ANSWER:
        commit_after_answer(seconds=2.0)
    return app.create_app()


def main(arguments: list[str]) -> int:
    uvicorn.run(create_app, factory=True, fd=int(arguments[0]))
    return 0
