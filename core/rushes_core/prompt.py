"""What a prompt may be: the checks that need no model, and the tokenizer that measures it."""

import unicodedata
from pathlib import Path

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
    lone = next((i for i, c in enumerate(prompt) if "\ud800" <= c <= "\udfff"), None)
    if lone is not None:
        raise _refused(f"must be valid Unicode: lone surrogate U+{ord(prompt[lone]):04X} at position {lone}")
    if not any(_is_visible(character) for character in prompt):
        raise _refused("must contain visible text")
    found = next((token for token in CONTROL_TOKENS if token in prompt), None)
    if found is not None:
        raise _refused(f"must not contain the control token {found!r}")


def _is_visible(character: str) -> bool:
    # separators, controls, marks with nothing to stand on, and the blanks that Unicode counts as Lo or So
    return unicodedata.category(character)[0] not in "ZCM" and character not in "\u115f\u1160\u3164\uffa0\u2800\ufffc"


def _refused(message: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(f"prompt {message}", param="prompt", code=code)


class PromptTokenizer:
    """The checkpoint's tokenizer, used as the model was trained: verbatim text, no special tokens added."""

    def __init__(self, tokenizer_json: Path) -> None:
        self._tokenizer = load_tokenizer(tokenizer_json.parent)
        self._control_ids = {
            token_id for token in CONTROL_TOKENS if (token_id := self._tokenizer.token_to_id(token)) is not None
        }

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
