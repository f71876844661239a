"""The bodies of requests and responses, from which the OpenAPI document is generated.

Fields of OpenAI's API have the same names here. Additions are `memory`, `sources`, `support`, `min_support` and
`on_low_support` in requests, and `knnlm` in responses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from knnlm.corpus import INTEGER_LIMIT, MAX_FIELD_LENGTH, MAX_FIELDS, invalid_fields

_MAX_COPIES = 16
_MAX_PROMPTS = 64
_MAX_BEAMS = 16
_MAX_K = 16_384
_MAX_SOURCES = 64

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Name = Annotated[str, StringConstraints(max_length=512)]
TokenNumber = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
EmptyList = Annotated[list[Any], Field(max_length=0)]

# Fields of OpenAI's API that are not supported. Null and values without effect are accepted; others are errors with
# these messages.
UNSUPPORTED_FIELDS = {
    "audio": "only text is generated.",
    "function_call": "function calls are not supported.",
    "functions": "function calls are not supported.",
    "modalities": 'only text is generated: use ["text"].',
    "parallel_tool_calls": "tool calls are not supported.",
    "prediction": "predicted outputs are not supported.",
    "reasoning_effort": "reasoning effort is not supported.",
    "response_format": 'only {"type": "text"} is supported: structured output is not.',
    "store": "responses are not stored: use false.",
    "suffix": "insertion before a suffix is not supported.",
    "tool_calls": "tool calls are not supported.",
    "tool_choice": 'tool calls are not supported: use "none" or "auto".',
    "tools": "tool calls are not supported.",
    "verbosity": "verbosity is not supported. Use max_tokens.",
    "web_search_options": "web search is not supported.",
}


class Body(BaseModel):
    """The body of a request; unknown fields are errors, so that misspelt ones are not ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class MemorySettings(Body):
    """Settings of the memories; the defaults are those of the server."""

    off: bool = Field(False, description="Use the language model alone.")
    lmbda: float | None = Field(None, ge=0, le=1, alias="lambda", description="λ, the total weight of the memories.")
    k: int | None = Field(None, ge=1, le=_MAX_K, description="Number of neighbours.")
    knn_temperature: float | None = Field(
        None, ge=1e-9, le=1e9, description="τ, the temperature of the neighbours' votes."
    )
    memories: list[Name] | None = Field(None, min_length=1, max_length=16, description="Names of the memories to use.")
    domain_check: bool | None = Field(
        None,
        description="Leave the memories out after a prompt that they predict no better than the model does; False: use "
        "them after every prompt.",
    )


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingRequest(Body):
    """The fields that completions and chat share."""

    model: Name | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=_MAX_COPIES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    seed: Seed | None = None
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted from log p of tokens in the text."
    )
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Subtracted once for each occurrence.")
    logit_bias: Annotated[dict[TokenNumber, Bias], Field(max_length=4096)] | None = Field(
        None, description="Added to log p, by token id."
    )
    user: Name | None = Field(None, description="Accepted and not used, as are the next four.")
    metadata: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    service_tier: Name | None = None
    store: Literal[False] | None = None
    memory: MemorySettings | None = None
    sources: int = Field(0, ge=0, le=_MAX_SOURCES, description="Sources to return for each token.")
    support: bool | None = Field(
        None, description="Return the support of each token. Default: with sources, logprobs or min_support."
    )
    min_support: float | None = Field(
        None, ge=0, le=1, description="Smallest mean support of the last 8 generated tokens."
    )
    on_low_support: Literal["end", "mark"] = Field(
        "end", description='Below min_support: end the answer with finish_reason "support", or set low_support only.'
    )


class CompletionRequest(SamplingRequest):
    """Continue a prompt: a text, a list of tokens, or several of either."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=_MAX_PROMPTS)]
    ) = ""
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=_MAX_COPIES, description="Only the value of n is supported.")
    suffix: Literal[""] | None = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: Name | None = None
    # Fields of earlier responses that clients send back.
    refusal: None = None
    annotations: EmptyList | None = None
    audio: None = None
    function_call: None = None
    tool_calls: EmptyList | None = None


class ResponseFormat(Body):
    """The format of the response."""

    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """Answer the last message of a conversation."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: EmptyList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: EmptyList | None = None
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


def _check_texts(texts: str | list[str]) -> str | list[str]:
    """Raise for a list of none or too many texts."""
    if isinstance(texts, list) and not 1 <= len(texts) <= _MAX_PROMPTS:
        problem = f"a list of 1 to {_MAX_PROMPTS} texts is allowed, not {len(texts):,}."
        raise PydanticCustomError("texts", "{problem}", {"problem": problem})
    return texts


_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": _MAX_PROMPTS}


class TranslateRequest(Body):
    """Translate a text or several, each on its own."""

    model: Name | None = None
    # Checked after the union, so that the message is not that of its first member.
    text: Annotated[str | list[str], AfterValidator(_check_texts), WithJsonSchema({"anyOf": [_TEXT, _TEXTS]})]
    beams: int | None = Field(None, ge=1, le=_MAX_BEAMS, description="Default: as the model's configuration says.")
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Of each translation. Default: 256.")
    temperature: float | None = Field(None, ge=0, le=2, description="Default: 0, the most probable translation.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: Seed | None = None
    memory: MemorySettings | None = None
    sources: int = Field(0, ge=0, le=_MAX_SOURCES, description="Sources to return for each token.")
    tokens: bool | None = Field(None, description="Return the tokens with their probabilities. Default: with sources.")


class ScoreRequest(Body):
    """Score each token of a text."""

    model: Name | None = None
    text: Annotated[str, StringConstraints(min_length=1)]
    memory: MemorySettings | None = None
    sources: int = Field(0, ge=0, le=_MAX_SOURCES)


class RescoreRequest(Body):
    """Score an earlier text with other settings, without running the model."""

    id: Name
    lmbda: float | None = Field(None, ge=0, le=1, alias="lambda")
    k: int | None = Field(None, ge=1, le=_MAX_K)
    knn_temperature: float | None = Field(None, ge=1e-9, le=1e9)


class NeighboursRequest(Body):
    """Return the neighbours of a context."""

    model: Name | None = None
    prompt: str
    k: int = Field(8, ge=1, le=256)
    memory: MemorySettings | None = None


class ErrorDetails(BaseModel):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: ErrorDetails


class TokenSource(BaseModel):
    """A neighbour of a token's context: where it is stored, and its weight; `source_text` is the source of a pair."""

    memory: str
    document: str
    number: int
    source: str
    entry: int
    weight: float
    distance: float
    token: str
    before: str
    after: str
    source_text: str | None = None


class MemoryShare(BaseModel):
    """The probability and weight of one memory."""

    memory: str
    p: float
    weight: float


class TokenProvenance(BaseModel):
    """A token with its probabilities: p = (1 - weight) · p_lm + weight · p_knn.

    They are null in a translation that was requested without sources and without logprobs.
    """

    id: int
    text: str
    p_lm: float | None
    p_knn: float | None
    p: float | None
    weight: float | None
    support: float | None = None
    sources: list[TokenSource] = []
    shares: list[MemoryShare] | None = None


class CopiedPart(BaseModel):
    """Consecutive tokens of the text that were copied from a document; `start` counts the generated tokens."""

    start: int
    tokens: int
    document: str
    source: str
    offset: int


class DraftCounts(BaseModel):
    """How many tokens were drafted and accepted."""

    drafted: int
    accepted: int


class Drafts(DraftCounts):
    """These numbers, also by source, and the parts that were copied from the store."""

    sources: dict[str, DraftCounts]
    copied: list[CopiedPart]


class Provenance(BaseModel):
    """The tokens with their sources; `id` names the trace, which can be rescored with at most `k` neighbours.

    `supported_share` is the share of the tokens with a support of at least 0.5, and `low_support` whether support fell
    below the request's min_support. `memory` is false for a translation without the memories: they are off, or the
    source is outside their domain. `drafts` is present if the server makes drafts. `missing_shards` names the shards
    that a search on Ray has lacked. In a stream, all of them are in the last chunk.
    """

    id: str
    k: int
    tokens: list[TokenProvenance]
    supported_share: float | None = None
    low_support: bool | None = None
    memory: bool | None = None
    drafts: Drafts | None = None
    missing_shards: list[str] | None = None


class Usage(BaseModel):
    """Numbers of tokens."""

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


class CompletionResponse(BaseModel):
    """The continuations of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AssistantMessage(BaseModel):
    """A message of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One reply."""

    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None
    knnlm: Provenance


class ChatResponse(BaseModel):
    """The replies to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Translation(BaseModel):
    """One translation; `memory` is whether the memories were used, and `knnlm` is null if no tokens were requested."""

    index: int
    text: str
    finish_reason: str | None
    memory: bool
    knnlm: Provenance | None
    missing_shards: list[str] | None = None


class TranslateResponse(BaseModel):
    """The translations of texts, in their order."""

    id: str
    object: Literal["translation"]
    created: int
    model: str
    translations: list[Translation]
    usage: Usage


class ScoreResponse(BaseModel):
    """The score of a text, as a whole and token by token."""

    tokens: int
    log_p_lm: float | None
    log_p: float | None
    perplexity_lm: float | None
    perplexity: float | None
    knnlm: Provenance


class NeighboursResponse(BaseModel):
    """The neighbours of a context, the largest weight first."""

    neighbours: list[TokenSource]
    missing_shards: list[str] | None = None


class ModelMetadata(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    knnlm: dict[str, Any]


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelMetadata]


def _check_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Raise for fields that a record of a file cannot have either, with the same message."""
    if (problem := invalid_fields(fields)) is not None:
        raise PydanticCustomError("fields", "{problem}.", {"problem": problem})
    return fields


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
            },  # FastAPI converts them to floats
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
        ]
    },
    "description": "Metadata to select documents by.",
}
DocumentFields = Annotated[dict[str, Any], AfterValidator(_check_fields), WithJsonSchema(_FIELDS)]


class NewDocument(Body):
    """A document to add; in a store of pairs, `text` is the translation of `source_text`."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    text: Annotated[str, StringConstraints(min_length=1)]
    source: Name | None = None
    source_text: Annotated[str, StringConstraints(min_length=1)] | None = None
    fields: DocumentFields | None = None


class AddRequest(Body):
    """Documents to add."""

    documents: list[NewDocument] = Field(min_length=1, max_length=1024)


class DocumentMetadata(BaseModel):
    """A document of the store; `source_text` is the source of a pair."""

    number: int
    id: str
    source: str
    tokens: int
    first_entry: int
    fields: dict[str, str | int | float | bool | None]
    source_text: str | None = None


class DocumentList(BaseModel):
    """A page of the list of documents, and their total number."""

    total: int
    offset: int
    documents: list[DocumentMetadata]


class Passage(DocumentMetadata):
    """A passage of a document from token `offset` on; `token` is the requested one."""

    offset: int
    before: str
    token: str
    after: str
    more: bool


class AddedDocuments(BaseModel):
    """The numbers of added and skipped documents."""

    added: int
    skipped: int
    tokens: int


class RemovedDocument(BaseModel):
    """The number of removed documents."""

    removed: int
