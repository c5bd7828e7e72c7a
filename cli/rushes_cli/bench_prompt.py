"""The text of the prompts that benchmarks send."""

_WORDS = "waves roll against the lighthouse at dusk while a gull calls over the harbour "


def prompt_text(length: int) -> str:
    """`length` characters of English words, of which the tiny checkpoint makes as many tokens."""
    return (_WORDS * (length // len(_WORDS) + 1))[:length]
