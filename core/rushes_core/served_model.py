"""The model that a deployment serves, as the API needs to know it: its JSON files and tokenizer, no weights."""

from dataclasses import dataclass
from typing import Self

from rushes_core.contract import InferenceContract, load_contract
from rushes_core.errors import CheckpointError, CheckpointUnreadable, with_variable
from rushes_core.prompt import PromptTokenizer
from rushes_core.settings import Settings


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, schedule and limits of the served checkpoint."""

    name: str
    contract: InferenceContract
    tokenizer: PromptTokenizer
    max_prompt_tokens: int

    @classmethod
    def load(cls, settings: Settings) -> Self:
        """Read the checkpoint that the settings name.

        Raises:
            CheckpointError: the directory, its contract or its tokenizer cannot be served.
            CheckpointUnreadable: its file system failed.
        """
        try:
            contract = load_contract(settings.checkpoint)
            tokenizer = PromptTokenizer(settings.checkpoint / "tokenizer" / "tokenizer.json")
        except (CheckpointError, CheckpointUnreadable) as error:
            raise type(error)(with_variable(error)) from error
        return cls(
            name=model_name(settings, contract),
            contract=contract,
            tokenizer=tokenizer,
            max_prompt_tokens=settings.max_prompt_tokens,
        )


def model_name(settings: Settings, contract: InferenceContract) -> str:
    """The name by which clients ask for the model and workers claim its jobs."""
    return settings.model_name or contract.model_id
