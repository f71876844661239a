"""The bodies of requests and answers, as the OpenAPI document shows them. Knows nothing about what is done with them.

What OpenAI's API has is named as there. What it has not: `memory` and `sources` in a request, `knnlm` in a choice.

The bodies of requests and answers about documents, as the OpenAPI document shows them.

Knows nothing about what is done with them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from knnlm.corpus import INTEGER_LIMIT, MAX_FIELD_LENGTH, MAX_FIELDS, invalid_fields

MOST_COPIES = 16

MOST_PROMPTS = 64

MOST_K = 16_384

MOST_SOURCES = 64

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]

Name = Annotated[str, StringConstraints(max_length=512)]

TokenNumber = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]

Bias = Annotated[float, Field(ge=-100, le=100)]

Nothing = Annotated[list[Any], Field(max_length=0)]

# Fields of OpenAI's API that this server has no use for. Left out, null or with the value that asks for nothing, they
# are taken; anything else is refused in these words, never passed over.
NOT_HERE = {
    "audio": "this server writes text only.",
    "function_call": "this server calls no functions.",
    "functions": "this server calls no functions.",
    "modalities": 'this server writes text only: ["text"].',
    "parallel_tool_calls": "this server calls no tools.",
    "prediction": "predicted outputs are not supported.",
    "reasoning_effort": "the model is not told how long to reason.",
    "response_format": 'only {"type": "text"} is supported: what the model writes is not forced into a form.',
    "store": "answers are not stored: only false.",
    "suffix": "text is only continued, not inserted before a suffix.",
    "tool_calls": "this server calls no tools.",
    "tool_choice": 'this server calls no tools: only "none" or "auto".',
    "tools": "this server calls no tools.",
    "verbosity": "the model is not told how much to write. Use max_tokens.",
    "web_search_options": "this server searches its memory only.",
}


class Body(BaseModel):
    """What a request sends: a field that nobody knows is refused, so that no misspelt one is passed over."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class MemorySettings(Body):
    """How the memory takes part; what is left out is as the server was started."""

    off: bool = Field(False, description="The model alone.")
    lmbda: float | None = Field(None, ge=0, le=1, alias="lambda", description="λ, the weight of all memories.")
    k: int | None = Field(None, ge=1, le=MOST_K, description="How many neighbours vote.")
    knn_temperature: float | None = Field(None, ge=1e-9, le=1e9, description="τ of the vote.")
    memories: list[Name] | None = Field(None, min_length=1, max_length=16, description="Which of the memories.")


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(Body):
    """What completions and chat have in common."""

    model: Name | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_COPIES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    seed: Seed | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Taken from log p of tokens written before.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="The same for each time that they were.")
    logit_bias: Annotated[dict[TokenNumber, Bias], Field(max_length=4096)] | None = Field(
        None, description="Added to log p, by token."
    )
    user: Name | None = Field(None, description="Taken, and not used; so are the next four.")
    metadata: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    service_tier: Name | None = None
    store: Literal[False] | None = None
    memory: MemorySettings | None = None
    sources: int = Field(0, ge=0, le=MOST_SOURCES, description="Sources to name for each token.")


class CompletionRequest(Sampling):
    """Continue a prompt: a text, tokens, or several of either."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)]
    ) = ""
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MOST_COPIES, description="Only the same as n.")
    suffix: Literal[""] | None = None


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: Name | None = None
    # What clients send back with an answer of ours.
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None


class ResponseFormat(Body):
    """What the answer is to look like."""

    type: Literal["text"]


class ChatRequest(Sampling):
    """Answer the last message of a conversation."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class ScoreRequest(Body):
    """Say how probable a text is, token by token."""

    model: Name | None = None
    text: Annotated[str, StringConstraints(min_length=1)]
    memory: MemorySettings | None = None
    sources: int = Field(0, ge=0, le=MOST_SOURCES)


class RescoreRequest(Body):
    """Weigh a text anew that was scored or written a while ago."""

    id: Name
    lmbda: float | None = Field(None, ge=0, le=1, alias="lambda")
    k: int | None = Field(None, ge=1, le=MOST_K)
    knn_temperature: float | None = Field(None, ge=1e-9, le=1e9)


class NeighboursRequest(Body):
    """Say what a context retrieves."""

    model: Name | None = None
    prompt: str
    k: int = Field(8, ge=1, le=256)
    memory: MemorySettings | None = None


class ErrorFacts(BaseModel):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error."""

    error: ErrorFacts


class SourceFacts(BaseModel):
    """A stored context that spoke for a token."""

    memory: str
    document: str
    number: int
    source: str
    row: int
    weight: float
    distance: float
    token: str
    before: str
    after: str


class ShareFacts(BaseModel):
    """What one of several memories gave."""

    memory: str
    p: float
    weight: float


class TokenFacts(BaseModel):
    """A token: p = (1 - weight) · p_lm + weight · p_knn."""

    id: int
    text: str
    p_lm: float | None
    p_knn: float | None
    p: float | None
    weight: float
    sources: list[SourceFacts] = []
    shares: list[ShareFacts] | None = None


class Provenance(BaseModel):
    """Where the tokens come from."""

    id: str
    k: int
    tokens: list[TokenFacts]


class Usage(BaseModel):
    """What was read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None
    knnlm: Provenance


class CompletionAnswer(BaseModel):
    """Continuations of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Answered(BaseModel):
    """A message of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: Answered
    finish_reason: str | None
    logprobs: dict[str, Any] | None
    knnlm: Provenance


class ChatAnswer(BaseModel):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ScoreTotals(BaseModel):
    """A text as a whole."""

    tokens: int
    log_p_lm: float | None
    log_p: float | None
    perplexity_lm: float | None
    perplexity: float | None


class ScoreAnswer(ScoreTotals):
    """Token by token, and the whole."""

    knnlm: Provenance


class NeighboursAnswer(BaseModel):
    """What a context retrieved, the loudest first."""

    neighbours: list[SourceFacts]


class ModelFacts(BaseModel):
    """What is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    knnlm: dict[str, Any]


class ModelList(BaseModel):
    """All that is served."""

    object: Literal["list"]
    data: list[ModelFacts]


def _check_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse what the record of a file could not say either, in the same words."""
    if (wrong := invalid_fields(given)) is not None:
        raise PydanticCustomError("fields", "{wrong}.", {"wrong": wrong})
    return given


_FIELDS: dict[str, Any] = {
    "type": "object",
    "maxProperties": MAX_FIELDS,
    "propertyNames": {"minLength": 1, "maxLength": MAX_FIELD_LENGTH},
    "additionalProperties": {
        "anyOf": [
            {"type": "string", "maxLength": MAX_FIELD_LENGTH},
            {
                "type": "integer",
                "minimum": -INTEGER_LIMIT,
                "exclusiveMaximum": INTEGER_LIMIT,
            },  # FastAPI makes them floats
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


class AddedDocuments(BaseModel):
    """What became of texts that were to be remembered."""

    added: int
    skipped: int
    tokens: int


class RemovedDocument(BaseModel):
    """What was removed."""

    removed: int
