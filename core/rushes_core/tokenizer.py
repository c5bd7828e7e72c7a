"""The checkpoint's tokenizer: Qwen's byte-level BPE and the tokens that MiniMax-H3 adds to it."""

from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Tokenizer

from rushes_core.errors import CheckpointError
from rushes_core.json_file import read_json_object, read_small_file

QWEN_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen's control tokens, in the order of their ids."""

QWEN_WORD_TOKENS: tuple[str, ...] = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Qwen's added tokens that are not marked special; they follow `QWEN_TOKENS`."""

H3_TOKENS: tuple[str, ...] = (
    "<d>",
    "</d>",
    "<|cutoff|>",
    "<|lyrics_start|>",
    "<|lyrics_end|>",
    "<|caption_start|>",
    "<|caption_end|>",
)
"""Marks of dialogue, cuts, lyrics and captions. Their ids follow Qwen's, and the released tokenizer.json lacks them:
they are declared in tokenizer_config.json. A plain Qwen tokenizer would cut them into ordinary text without an error.
"""


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of `folder`, with what tokenizer.json and tokenizer_config.json declare together.

    Raises:
        CheckpointError: a file is missing or unreadable, or the H3 tokens are absent or do not follow Qwen's.
    """
    path = folder / "tokenizer.json"
    data = read_small_file(path)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot parse
        raise CheckpointError(f"{path}: not a readable tokenizer: {error}") from error
    # saved with it where it was last used for a batch; it would cut prompts or fill them up, and none would be told
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_path = folder / "tokenizer_config.json"
    declared = _declared(read_json_object(config_path), config_path)
    missing = [token for token in declared if tokenizer.token_to_id(token) is None]
    added = [AddedToken(token, normalized=False) for token in missing]
    tokenizer.add_special_tokens(added)  # pyright: ignore[reportUnknownMemberType]
    _check_tokens(tokenizer, path, config_path)
    return tokenizer


def _declared(config: dict[str, object], path: Path) -> list[str]:
    """Special tokens that the config adds, in the order in which they get their ids."""
    tokens: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value: object = config.get(key) or []
        if isinstance(value, dict):
            value = list(cast("dict[str, object]", value).values())
        if not isinstance(value, list):
            raise CheckpointError(f"{path}: {key} is {value!r}, expected a list of tokens")
        for entry in cast("list[object]", value):
            token = cast("dict[str, object]", entry).get("content") if isinstance(entry, dict) else entry
            if not isinstance(token, str) or not token:
                raise CheckpointError(f"{path}: {key} holds {entry!r}, expected a token")
            tokens.append(token)
    return tokens


def _check_tokens(tokenizer: Tokenizer, path: Path, config_path: Path) -> None:
    first = tokenizer.token_to_id(QWEN_TOKENS[0])
    if first is None:
        raise CheckpointError(f"{path}: no token {QWEN_TOKENS[0]!r}, expected Qwen's tokenizer")
    for offset, token in enumerate(QWEN_TOKENS + QWEN_WORD_TOKENS + H3_TOKENS):
        found = tokenizer.token_to_id(token)
        if found is None and token in H3_TOKENS:
            raise CheckpointError(
                f"{config_path}: additional_special_tokens lacks {token!r}: without it dialogue and lyrics marks "
                "reach the text encoder as ordinary text"
            )
        if found != first + offset:
            raise CheckpointError(f"{path}: token {token!r} has id {found}, expected {first + offset}")
