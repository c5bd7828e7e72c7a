"""What all lists of the API hold."""

from pydantic import BaseModel


class Listed(BaseModel):
    """A thing with an id, by which the next page of a list is asked for."""

    id: str
