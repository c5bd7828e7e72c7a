"""The API on a canvas small enough for a few dozen clips a minute, with the faults of the environment."""

import os

from fastapi import FastAPI
from rushes_api import app
from rushes_core.canvas import BY_SIZE, Canvas
from support.faults.mutants import commit_after_answer, install

SIZE = "64x64"
COMMIT_AFTER_ANSWER = "commit after answer"
BY_SIZE[SIZE] = Canvas("1:1", 64, 64, 64)


def create_app() -> FastAPI:
    install()
    if os.environ.get("FAULT_MUTANT") == COMMIT_AFTER_ANSWER:
        commit_after_answer(seconds=2.0)
    return app.create_app()
