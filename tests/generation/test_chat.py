"""Conversations: which tokens are those of users, of the model and of the template."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import tiny, tiny_tokenizer
from knnlm.errors import ParameterError
from knnlm.generation.chat import encode_chat, has_template, render_chat
from knnlm.lm.causal import CausalLM, token_offsets
from knnlm.memories.base import Origin

TEMPLATES = {
    "marks": (
        "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</{{ m.role }}>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    ),
    "default system": (
        "{% if messages[0].role != 'system' %}system: be a helpful user of tools\n{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    ),
    "trimmed": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} {% endfor %}[assistant]",
    "system in the first message": (
        "{% if messages[0].role == 'system' %}{% set head = messages[0].content %}{% set rest = messages[1:] %}"
        "{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}[{{ m.role }}] {% if loop.first %}<<{{ head }}>> {% endif %}{{ m.content }}\n{% endfor %}"
    ),
    "bare": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "twice": "{% for m in messages %}{{ m.content }} / {{ m.content }}\n{% endfor %}",
    "answers left out": "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}\n{% endif %}{% endfor %}",
}
# Each kind of message has letters of its own, so that the origin of a token is seen from its characters.
LETTERS = {"user": "ABC. ", "tool": "DEF, ", "assistant": "123-", "system": "456+"}
EXPECTED = {"user": Origin.GIVEN, "tool": Origin.GIVEN, "assistant": Origin.GENERATED}

message = st.sampled_from(list(LETTERS)).flatmap(
    lambda role: st.text(LETTERS[role], max_size=12).map(lambda content: {"role": role, "content": content})
)


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def origins_by_hand(text, offsets):
    """Return the origin of each token, where its letters show it; None for spaces and for letters of several kinds."""
    expected = []
    for begin, end in offsets:
        letters = set(text[begin:end]) - {" "}
        roles = [role for role, own in LETTERS.items() if letters and letters <= set(own)]
        inside = EXPECTED.get(roles[0], Origin.HIDDEN) if roles else Origin.HIDDEN
        expected.append(inside if letters else None)
    return expected


@pytest.mark.parametrize("template", TEMPLATES)
@given(messages=st.lists(message, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_origin_of_each_token_is_that_of_its_characters(template, messages):
    tokenizer = tokenizer_with(TEMPLATES[template])
    rendered = render_chat(tokenizer, messages)
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered.text == expected
    tokens, offsets = token_offsets(tokenizer, rendered.text)
    assert tokens == tokenizer(expected, add_special_tokens=False)["input_ids"]
    origins = rendered.origins(offsets)
    crossing = {  # a token of two contents, or of a content and the template, is hidden
        number
        for number, (begin, end) in enumerate(offsets)
        if any(begin < each.begin < end or begin < each.end < end for each in rendered.contents)
    }
    for number, (origin, by_hand) in enumerate(zip(origins, origins_by_hand(rendered.text, offsets), strict=True)):
        if number in crossing:
            assert origin == Origin.HIDDEN
        elif by_hand is not None:
            assert origin == by_hand, (rendered.text, offsets[number])


@pytest.mark.parametrize("content", ["user", "a", "assistant", "\n", "<user>\n", "helpful", "</user>\n<assistant>\n"])
@pytest.mark.parametrize("template", ["marks", "default system", "trimmed"])
def test_content_that_also_occurs_in_the_template_is_located(template, content):
    messages = [
        {"role": "system", "content": content},
        {"role": "user", "content": content},
        {"role": "assistant", "content": content},
        {"role": "user", "content": content},
    ]
    rendered = render_chat(tokenizer_with(TEMPLATES[template]), messages)
    assert [each.origin for each in rendered.contents] == [
        Origin.HIDDEN,
        Origin.GIVEN,
        Origin.GENERATED,
        Origin.GIVEN,
    ]
    shown = content.strip() if template == "trimmed" else content
    assert [rendered.text[each.begin : each.end] for each in rendered.contents] == [shown] * 4


REWRITES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | upper if m.role == 'assistant' else m.content }}\n{% endfor %}"
)


def test_only_the_last_message_is_readable_where_the_template_changes_others():
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    rendered = render_chat(tokenizer_with(REWRITES), messages)
    assert rendered.text == "user: one\nassistant: TWO\nuser: three\n"
    assert [(rendered.text[each.begin : each.end], each.origin) for each in rendered.contents] == [
        ("three", Origin.GIVEN)
    ]
    assert render_chat(tokenizer_with(REWRITES), messages[:2]).contents == []


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | upper }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ messages[-1].content | length }}",
        "{% for m in messages %}{{ m.content if m.content | length < 9 else raise_exception('long') }}{% endfor %}",
    ],
    ids=["changed", "counted", "marks refused"],
)
def test_nothing_is_readable_where_the_last_message_is_not_found(template):
    tokenizer = tokenizer_with(template)
    rendered = render_chat(tokenizer, [{"role": "user", "content": "some"}])
    assert rendered.contents == [] or rendered.text[rendered.contents[0].begin :].startswith("\n")
    _, offsets = token_offsets(tokenizer, rendered.text)
    assert set(rendered.origins(offsets)) == {Origin.HIDDEN}


def test_template_that_refuses_the_messages_is_an_error():
    with pytest.raises(ParameterError, match="rejects the messages: no roles"):
        render_chat(tokenizer_with("{{ raise_exception('no roles') }}"), [{"role": "user", "content": "some"}])


def test_tokenizer_without_offsets_leaves_all_tokens_hidden():
    class Slow:
        is_fast = False

        def __call__(self, text, **_):
            return {"input_ids": list(range(len(text)))}

    tokens, offsets = token_offsets(Slow(), "some")
    rendered = render_chat(tokenizer_with(TEMPLATES["bare"]), [{"role": "user", "content": "some"}])
    assert rendered.origins(offsets) == [Origin.HIDDEN] * len(tokens) == [Origin.HIDDEN] * 4
    assert not has_template(Slow())


@pytest.mark.parametrize("template", [TEMPLATES["marks"], None], ids=["template", "no template"])
def test_encoded_chat_marks_the_tokens_of_users(template):
    lm = CausalLM(tiny("llama"), tokenizer_with(template), name="tiny")
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "Where are the others?"},
        {"role": "assistant", "content": "Here."},
        {"role": "user", "content": "And now?"},
    ]
    chat = encode_chat(lm, messages)
    text = render_chat(lm.tokenizer, messages).text
    expected = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert chat.tokens == (expected if template else [lm.start_token, *expected])
    shown = {
        origin: lm.decode([token for token, own in zip(chat.tokens, chat.origins, strict=True) if own == origin])
        for origin in (Origin.GIVEN, Origin.GENERATED)
    }
    assert shown == {Origin.GIVEN: "Where are the others?And now?", Origin.GENERATED: "Here."}
    assert chat.readable == [origin == Origin.GIVEN for origin in chat.origins]
