"""The operations of a server whose store has pairs: a source is translated, and a conversation is its last message."""

from __future__ import annotations

from typing import Any, NoReturn

from knnlm.errors import ParameterError
from knnlm.lm.seq2seq import Seq2SeqLM
from knnlm.mixture.mixture import Mixture
from knnlm.server.engine.requests import TranslationRequest
from knnlm.server.engine.sequence import GREEDY_TEMPERATURE
from knnlm.server.engine.translator import Translator
from knnlm.server.schemas import (
    ChatRequest,
    CompletionRequest,
    NeighboursRequest,
    SamplingRequest,
    ScoreRequest,
    TranslateRequest,
)
from knnlm.server.service import PreparedRequest, ScoredText, Service, Unsupported, overrides_of

DEFAULT_MAX_TOKENS = 256  # of a translation

# A text of more characters than this for each allowed token is first tokenised in part.
_PREVIEW_CHARACTERS = 16
_PREVIEW_SLACK = 64  # tokens that may depend on where the text is cut

_UNSUPPORTED = ("stop", "presence_penalty", "frequency_penalty", "logit_bias", "echo", "min_support")


def make_service(mixture: Mixture, *, name: str, **options: Any) -> Service:
    """Build the service of a mixture: completions with a decoder-only model, translations with an encoder-decoder."""
    kind = TranslationService if mixture.lm.has_encoder else Service
    return kind(mixture, name=name, **options)


class TranslationService(Service):
    """A served mixture of an encoder-decoder model."""

    scheduler_class = Translator

    def __init__(self, mixture: Mixture, *, name: str, **options: Any) -> None:
        if options.get("draft"):
            raise ParameterError("Translations cannot be drafted. Serve the store without --draft.")
        super().__init__(mixture, name=name, **options)
        # Tokenizers are not thread-safe: this one is for request threads, which hold the lock.
        own = mixture.lm.with_own_tokenizer()
        assert isinstance(own, Seq2SeqLM)
        self._source_lm = own

    def model_metadata(self, name: str | None = None) -> dict[str, Any]:
        """Return the settings of the served model; raise UnknownModel for another name."""
        metadata = super().model_metadata(name)
        lm = self._source_lm
        languages = {"src_lang": lm.src_lang, "tgt_lang": lm.tgt_lang}
        metadata["knnlm"] |= {"max_prompt_tokens": self._max_source_tokens, **languages}
        return metadata

    def prepare_translation(self, body: TranslateRequest) -> PreparedRequest:
        """Validate and tokenise texts to translate."""
        self._check_model(body.model)
        if body.beams is not None and (body.temperature or 0.0) > GREEDY_TEMPERATURE and body.beams > 1:
            raise Unsupported("beams", "sampling with several beams is not supported. Use one of both.")
        if body.tokens is False and body.sources:
            raise Unsupported("tokens", "sources are those of tokens: use true, or no sources.")
        texts = [body.text] if isinstance(body.text, str) else body.text
        scored = bool(body.sources or body.tokens)
        requests = [
            TranslationRequest(
                tokens=(),
                max_tokens=self._max_target_tokens(body.max_tokens),
                temperature=body.temperature or 0.0,
                top_p=1.0 if body.top_p is None else body.top_p,
                # Texts that are sampled with one seed are not sampled alike.
                seed=None if body.seed is None else body.seed + number,
                sources=body.sources,
                overrides=overrides_of(body.memory),
                deadline=self._deadline(),
                support=scored,
                first_choice=number,
                source=self._encode_source(text, "text" if isinstance(body.text, str) else f"text.{number}"),
                beams=body.beams,
                scored=scored,
            )
            for number, text in enumerate(texts)
        ]
        return self._prepared_translations(requests, None)

    def prepare_completion(self, body: CompletionRequest) -> PreparedRequest:
        """Validate a request for completions, whose prompts are the sources."""
        self._check_model(body.model)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise Unsupported("best_of", "only the same value as n is supported.")
        prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise Unsupported("prompt", "tokens are not supported with a store of pairs. Send the text to translate.")
        return self._prepare(body, texts, body.max_tokens, body.logprobs, param="prompt")

    def prepare_chat(self, body: ChatRequest) -> PreparedRequest:
        """Validate a conversation, whose last user message is the source."""
        self._check_model(body.model)
        if body.top_logprobs and not body.logprobs:
            raise Unsupported("top_logprobs", "needs logprobs: true.")
        content = next((message.content for message in reversed(body.messages) if message.role == "user"), None)
        if content is None:
            raise Unsupported("messages", "there is no message of the role user, which would be translated.")
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        alternatives = (body.top_logprobs or 0) if body.logprobs else None
        return self._prepare(body, [text], max_tokens, alternatives, param="messages")

    async def score(self, body: ScoreRequest) -> ScoredText:
        """Raise an error: a text without its source cannot be scored."""
        self._refuse("/v1/score", body.model)

    async def neighbours(self, body: NeighboursRequest) -> dict[str, Any]:
        """Raise an error: a text without its source has no neighbours."""
        self._refuse("/v1/neighbours", body.model)

    def _refuse(self, route: str, model: str | None) -> NoReturn:
        self._check_model(model)
        raise ParameterError(
            f"{route} needs a store of texts, but this one has pairs. Use /v1/translate, with sources for neighbours."
        )

    def _prepare(
        self, body: SamplingRequest, texts: list[str], max_tokens: int | None, alternatives: int | None, *, param: str
    ) -> PreparedRequest:
        for name in _UNSUPPORTED:
            if getattr(body, name, None):
                raise Unsupported(name, "not supported with a store of pairs.")
        scored = body.sources > 0 or alternatives is not None or bool(body.support)
        copies = body.n or 1
        sampling = body.model_copy(update={"temperature": body.temperature or 0.0})
        requests = []
        for number, text in enumerate(texts):
            request = self._generation_request(
                [],
                sampling,
                TranslationRequest,
                max_tokens=self._max_target_tokens(max_tokens),
                alternatives=alternatives or 0,
                first_choice=number * copies,
                source=self._encode_source(text, param),
                scored=scored,
            )
            assert isinstance(request, TranslationRequest)
            requests.append(request)
        return self._prepared_translations(requests, alternatives)

    def _prepared_translations(self, requests: list[TranslationRequest], alternatives: int | None) -> PreparedRequest:
        assert isinstance(self.scheduler, Translator)
        for request in requests:
            sequences = request.copies * self.scheduler.beams(request)
            if sequences > self.limits.slots:
                raise ParameterError(
                    f"{sequences:,} beams and copies are requested, but this server has {self.limits.slots:,} slots."
                )
        return self._prepared(list(requests), sum(len(request.source) for request in requests), alternatives)

    def _max_target_tokens(self, wanted: int | None) -> int:
        """Return how many tokens a translation may have; raise for a number above the limits."""
        longest = self.mixture.max_length
        limit = self.limits.output_tokens if longest is None else min(self.limits.output_tokens, longest - 1)
        if wanted is None:
            return min(DEFAULT_MAX_TOKENS, limit)
        if wanted < 1:
            raise Unsupported("max_tokens", "a translation has at least one token.")
        if wanted > limit:
            raise ParameterError(f"{wanted:,} tokens are requested, but this server generates {limit:,} at most.")
        return wanted

    @property
    def _max_source_tokens(self) -> int:
        longest = self._source_lm.max_source_length
        return self.limits.prompt_tokens if longest is None else min(self.limits.prompt_tokens, longest)

    def _encode_source(self, text: str, param: str) -> tuple[int, ...]:
        """Return the tokens of a source; raise for one that is empty, not valid Unicode, or too long."""
        if not text.strip():
            raise Unsupported(param, "the text is empty: there is nothing to translate.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError(f"The text is not valid Unicode at character {error.start}. Send UTF-8.") from None
        limit = self._max_source_tokens
        preview = _PREVIEW_CHARACTERS * limit
        with self._tokenizer_lock:
            # Tokenising a megabyte takes seconds and blocks other requests, so reject it by its beginning.
            if len(text) > 2 * preview and self._source_length(text[:preview]) > limit + _PREVIEW_SLACK:
                raise ParameterError(_too_long("far more than " + f"{limit:,}", limit))
            if (length := self._source_length(text)) > limit:
                raise ParameterError(_too_long(f"{length:,}", limit))
            (tokens,) = self._source_lm.encode_sources([text])
        return tuple(tokens)

    def _source_length(self, text: str) -> int:
        tokens: list[int] = self._source_lm.tokenizer(text, verbose=False)["input_ids"]
        return len(tokens)


def _too_long(length: str, limit: int) -> str:
    return f"The text has {length} tokens, but {limit:,} at most are translated at once. Split it into sentences."
