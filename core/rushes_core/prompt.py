"""What a prompt may be: the checks that need no model, and the tokenizer that measures it."""

import json
import unicodedata
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rushes_core.errors import InvalidRequest
from rushes_core.tokenizer import QWEN_TOKENS, load_tokenizer

CONTROL_TOKENS = QWEN_TOKENS
"""Qwen's control tokens. Written in a prompt they would become role, end or picture marks of the text encoder."""

MAX_PROMPT_CHARACTERS = 65_536
"""Bound on what is tokenised at all; the limit that a prompt is held to is in tokens."""


def check_prompt(prompt: str) -> None:
    """Refuse a prompt that no model should see.

    Raises:
        InvalidRequest: it is empty or invisible, too long to tokenise, holds NUL, a lone surrogate or a control token.
    """
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise _refused(f"must be at most {MAX_PROMPT_CHARACTERS} characters, got {len(prompt)}", "prompt_too_long")
    if "\x00" in prompt:
        raise _refused(f"must not contain the NUL character (found at position {prompt.index(chr(0))})")
    lone = None if prompt.isascii() else next((i for i, c in enumerate(prompt) if "\ud800" <= c <= "\udfff"), None)
    if lone is not None:
        raise _refused(f"must be valid Unicode: lone surrogate U+{ord(prompt[lone]):04X} at position {lone}")
    if not any(_is_visible(character) for character in prompt):
        raise _refused("must contain visible text")
    found = next((token for token in CONTROL_TOKENS if token in prompt), None)
    if found is not None:
        raise _refused(f"must not contain the control token {found!r}")


def _is_visible(character: str) -> bool:
    category = unicodedata.category(character)
    if category == "Cn":
        # emoji and ideographs that are newer than Python's tables; a plane's last two code points are no characters
        return 0x1_0000 <= ord(character) < 0x4_0000 and ord(character) & 0xFFFE != 0xFFFE
    # separators, controls, marks with nothing to stand on, and the blanks that Unicode counts as Lo or So
    return category[0] not in "ZCM" and character not in "\u115f\u1160\u3164\uffa0\u2800\ufffc"


def _refused(message: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(f"prompt {message}", param="prompt", code=code)


class PromptTokenizer:
    """The checkpoint's tokenizer, used as the model was trained: verbatim text, no special tokens added."""

    def __init__(self, tokenizer_json: Path) -> None:
        self._tokenizer = load_tokenizer(tokenizer_json.parent)
        self._control_ids = {
            token_id for token in CONTROL_TOKENS if (token_id := self._tokenizer.token_to_id(token)) is not None
        }
        self._is_byte_level = _is_byte_level(self._tokenizer)

    def bound(self, prompt: str) -> int | None:
        """A number of tokens that `prompt` certainly has no more of; None: none is known without `encode`.

        A prompt that passes `check_prompt` and whose bound is at most the limit is one that `encode` takes.
        """
        if not self._is_byte_level:
            return None
        # no text has more than three times the bytes in NFC; a space may be put before it
        num_bytes = len(prompt) if prompt.isascii() else 3 * len(prompt.encode(errors="surrogatepass"))
        return num_bytes + 1

    def encode(self, prompt: str, *, max_tokens: int) -> list[int]:
        """Token ids of `prompt`, at least one.

        Raises:
            InvalidRequest: the prompt fails `check_prompt`, or has more than `max_tokens` tokens.
        """
        check_prompt(prompt)
        token_ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        if len(token_ids) > max_tokens:
            raise _refused(f"must be at most {max_tokens} tokens, got {len(token_ids)}", "prompt_too_long")
        if not token_ids:
            raise _refused("must contain at least one token")
        if not self._control_ids.isdisjoint(token_ids):
            raise _refused("must not contain a control token")
        return token_ids


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether every token stands for one or more bytes of the NFC text, and nothing of the text is left out."""
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    first: dict[str, Any] = parts["pre_tokenizer"] or {}
    steps: list[dict[str, Any]] = first.get("pretokenizers", [first])
    *splits, last = steps
    return (
        parts["model"]["type"] == "BPE"
        and (parts["normalizer"] is None or parts["normalizer"]["type"] == "NFC")
        and last.get("type") == "ByteLevel"
        and all(split["type"] == "Split" and split["behavior"] == "Isolated" for split in splits)
    )
