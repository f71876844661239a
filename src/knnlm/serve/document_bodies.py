"""The bodies of requests and answers about documents, as the OpenAPI document shows them.

Knows nothing about what is done with them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from knnlm.records import LARGEST, LONGEST, MOST, fault
from knnlm.serve.schema import Body, Name


def _check_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse what the record of a file could not say either, in the same words."""
    if (wrong := fault(given)) is not None:
        raise PydanticCustomError("fields", "{wrong}.", {"wrong": wrong})
    return given


_FIELDS: dict[str, Any] = {
    "type": "object",
    "maxProperties": MOST,
    "propertyNames": {"minLength": 1, "maxLength": LONGEST},
    "additionalProperties": {
        "anyOf": [
            {"type": "string", "maxLength": LONGEST},
            {"type": "integer", "minimum": -LARGEST, "exclusiveMaximum": LARGEST},  # FastAPI makes them floats
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
        ]
    },
    "description": "What else is to be known of it, to choose documents by.",
}
GivenFields = Annotated[dict[str, Any], AfterValidator(_check_fields), WithJsonSchema(_FIELDS)]


class NewDocument(Body):
    """A text to be remembered."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    text: Annotated[str, StringConstraints(min_length=1)]
    source: Name | None = None
    fields: GivenFields | None = None


class AddRequest(Body):
    """Texts to be remembered."""

    documents: list[NewDocument] = Field(min_length=1, max_length=1024)


class DocumentFacts(BaseModel):
    """A document of the memory."""

    number: int
    id: str
    source: str
    tokens: int
    first_row: int
    fields: dict[str, str | int | float | bool | None]


class DocumentList(BaseModel):
    """Some documents, and how many there are in all."""

    total: int
    offset: int
    documents: list[DocumentFacts]


class Passage(DocumentFacts):
    """Some text of a document: from a token of it on, with the token that was asked for between the two others."""

    offset: int
    before: str
    token: str
    after: str
    more: bool


class Added(BaseModel):
    """What became of texts that were to be remembered."""

    added: int
    skipped: int
    tokens: int


class Removed(BaseModel):
    """What was removed."""

    removed: int
