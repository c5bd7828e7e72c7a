"""What `rushes bench service` asks a service for: clips by length and prompt, each tried before anything is queued."""

import argparse
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rushes_core.errors import RushesError

from rushes_cli.bench_lengths import prompt_text
from rushes_cli.campaigns.client import Client, Refused
from rushes_cli.main import UsageError

MAX_CHARACTERS_A_TOKEN = 12
_OPTIONS = ("size", "priority")
"""Fields of a request that are named as the options that they come from."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a request asks for."""

    seconds: float
    tokens: int
    """That the service counts in the prompt."""
    body: dict[str, Any]

    @property
    def title(self) -> str:
        return f"{self.seconds:g} s, {self.tokens:,} tokens"


def shapes_of(client: Client, arguments: argparse.Namespace) -> list[Shape]:
    """Every combination of lengths, each tried by the service before anything is queued.

    Raises:
        Refused, Unreachable
        RushesError: the service takes no prompt of such a length.
    """
    # with a key that may not look, clips would be queued and never be heard of
    client.get("/v1/videos", limit=1)
    shapes = []
    common: dict[str, Any] = {"size": arguments.size}
    if arguments.priority is not None:
        common["priority"] = arguments.priority
    for tokens in arguments.tokens:
        prompt = None
        for seconds in arguments.seconds:
            body = common | {"seconds": f"{seconds:g}"}
            prompt = prompt or prompt_of(client, body, tokens)
            body |= {"prompt": prompt}
            shapes.append(Shape(seconds, _validated(client, body)["num_tokens"], body))
    return shapes


def prompt_of(client: Client, body: dict[str, Any], tokens: int) -> str:
    """A prompt in which the service counts `tokens`, or one less where no more text makes just one more.

    Raises:
        Refused: the service refuses something of `body` but the prompt.
        RushesError: it takes no prompt of this length.
    """

    def count(length: int) -> int:
        return _validated(client, body | {"prompt": prompt_text(length)})["num_tokens"]

    low, high = 1, tokens * MAX_CHARACTERS_A_TOKEN
    # the longest that is not too long: but for a word that is cut, what is longer has no fewer tokens
    while low < high:
        middle = (low + high + 1) // 2
        try:
            fits = count(middle) <= tokens
        except Refused as error:
            if error.param != "prompt":
                raise
            fits = False
        low, high = (middle, high) if fits else (low, middle - 1)
    if count(low) < tokens:
        try:
            count(low + 1)
        except Refused as error:
            raise RushesError(f"--tokens {tokens}: {error}") from None
    return prompt_text(low)


def _validated(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return client.post("/v1/videos/validate", body)
    except Refused as error:
        if error.status == HTTPStatus.BAD_REQUEST and error.param in _OPTIONS:
            raise UsageError(f"--{error}") from None
        raise
