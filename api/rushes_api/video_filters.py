"""Which videos a list is to hold, as its query says."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from pydantic_core import PydanticCustomError
from rushes_core.fields import is_storable, metadata_of, shown
from rushes_core.ids import is_campaign_id
from rushes_core.listing import Filters
from rushes_core.moment import parse_moment
from rushes_core.states import JobState

from rushes_api.errors import ApiError
from rushes_api.page import one_of

FILTER_PARAMETERS = (
    "status",
    "model",
    "created_after",
    "created_before",
    "metadata[]",
    "campaign_id",
    "custom_id",
)
_MAX_CUSTOM_ID = 256

_STATUSES = tuple(dict.fromkeys(state.public_status for state in JobState))


def filters_of(parameters: Mapping[str, str], states_of: Callable[[str], tuple[JobState, ...]]) -> Filters:
    """What `FILTER_PARAMETERS` say. A job is listed if it passes all of them.

    Args:
        states_of: the states that a job shown with this status may be in.

    Raises:
        ApiError: one of them is malformed.
    """
    states = None
    if "status" in parameters:
        words = [one_of("status", word, _STATUSES) for word in parameters["status"].split(",")]
        states = tuple(dict.fromkeys(state for word in words for state in states_of(word)))
    model = parameters.get("model")
    if model is not None and not is_storable(model):
        raise ApiError(f"model must be the name of a model, got {shown(model)}", param="model")
    return Filters(
        states=states,
        model=model,
        created_from=_second(parameters, "created_after", later=1),
        created_until=_second(parameters, "created_before", later=0),
        metadata=metadata_filter(parameters),
        campaign_id=_campaign_id(parameters),
        custom_id=_custom_id(parameters),
    )


def _campaign_id(parameters: Mapping[str, str]) -> str | None:
    wanted = parameters.get("campaign_id")
    if wanted is not None and not is_campaign_id(wanted):
        raise ApiError(f"campaign_id must be the id of a campaign, got {shown(wanted)}", param="campaign_id")
    return wanted


def _custom_id(parameters: Mapping[str, str]) -> str | None:
    wanted = parameters.get("custom_id")
    if wanted is not None and not (0 < len(wanted) <= _MAX_CUSTOM_ID and is_storable(wanted)):
        raise ApiError(
            f"custom_id must have 1 to {_MAX_CUSTOM_ID} characters and no NUL, got {shown(wanted)}", param="custom_id"
        )
    return wanted


def _second(parameters: Mapping[str, str], name: str, *, later: int) -> datetime | None:
    """The whole second, as videos show them, of a time; or one that is `later`."""
    if name not in parameters:
        return None
    try:
        moment = parse_moment(parameters[name])
        return datetime.fromtimestamp(int(moment.timestamp()) + later, UTC)
    except (ValueError, OverflowError) as error:
        raise ApiError(f"{name} {error}, got {shown(parameters[name])}", param=name) from error


def metadata_filter(parameters: Mapping[str, str]) -> dict[str, str]:
    """The pairs of `metadata[key]=value`.

    Raises:
        ApiError
    """
    pairs = {name[9:-1]: value for name, value in parameters.items() if name.startswith("metadata[")}
    try:
        return metadata_of(pairs)
    except PydanticCustomError as error:
        raise ApiError(f"metadata {error.message()}", param="metadata") from error
