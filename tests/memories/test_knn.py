"""The texts of stored passages, with tokenizers that drop spaces and with characters of several tokens."""

from __future__ import annotations

from knnlm.memories.knn import passage_texts

WORDS = ["", "▁The", "▁contract", "s", "▁end"]


def decode_words(tokens: list[int]) -> str:
    """Decode as SentencePiece does: without the space before the first word."""
    return "".join(WORDS[token] for token in tokens).replace("▁", " ").removeprefix(" ")


def decode_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def test_a_passage_keeps_the_space_before_its_token():
    assert passage_texts([1], [2, 3, 4], decode_words) == ("The", " contract", "s end")
    assert passage_texts([], [1, 2], decode_words) == ("", "The", " contract")
    assert passage_texts([1, 2], [], decode_words) == ("The contract", "", "")
    assert passage_texts([], [], decode_words) == ("", "", "")


def test_a_part_of_a_character_is_decoded_by_itself():
    letter = list("é".encode())
    assert passage_texts([97, letter[0]], [letter[1], 98], decode_bytes) == ("a\ufffd", "\ufffd", "b")
    assert passage_texts([97], [*letter, 98], decode_bytes) == ("a", "\ufffd", "\ufffdb")
    assert passage_texts([97], list(b"bc"), decode_bytes) == ("a", "b", "c")
