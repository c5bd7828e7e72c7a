"""Text that Postgres can hold, whatever it was made of."""


def storable(text: str) -> str:
    """`text` whose characters that Postgres refuses, NUL and lone surrogates, are escaped."""
    return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
