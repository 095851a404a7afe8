"""`text_offset`: the places of tokens in a text, in one piece and as it is streamed."""

from __future__ import annotations

from pagetide.server.completions import TextPlaces


def test_places_in_a_whole_text() -> None:
    for text, tokens, wanted in (
        ("The sea", ["The", " sea"], [0, 3]),
        ("The sea", ["<s>", "The", "<pad>", " sea", "</s>"], [0, 0, 3, 3, 7]),
        ("<s>The", ["<s>", "The"], [0, 3]),  # a prompt that has the characters
        ("The sea", [" The", " sea"], [0, 3]),
        ("a\U0001f40bb", ["a", "\ufffd", "\ufffd", "\ufffd", "b"], [0, 1, 1, 1, 2]),
        ("a\u6587\u5b57 b", ["a", " \ufffd", "\ufffd", "<pad>", "\ufffd", " b"], [0, 1, 1, 1, 1, 3]),
        ("a \u6587b", ["a", " \ufffd", "\ufffd", "b"], [0, 1, 2, 3]),
        ("The s", ["The", " sea", " and"], [0, 3, 5]),  # cut by a stop
        ("", ["<s>"], [0]),
    ):
        assert TextPlaces().add(text, tokens, ends=True) == wanted, tokens


def test_a_stream_whose_text_comes_with_its_tokens_or_later() -> None:
    for lag in range(5):
        tokens = ["The", " sea", " was", " \ufffd", "\ufffd", " blue", ".", "</s>"]
        texts = ["The", " sea", " was", " ", "\u6587", " blue", ".", ""]
        late = [""] * lag + texts
        places, found = TextPlaces(), []
        for number, token in enumerate(tokens):
            ends = number == len(tokens) - 1
            found += places.add("".join(late[number:]) if ends else late[number], [token], ends)
        if not lag:
            assert found == [0, 3, 7, 11, 12, 13, 18, 19]
        assert found[:4] == [0, 3, 7, 11] and found[-1] == 19
    # a special token takes no characters
    places = TextPlaces()
    assert places.add("The", ["The"], False) == [0]
    assert places.add("", ["<pad>"], False) == [3]
    assert places.add(" sea", [" sea"], False) == [3]
    assert places.add("", ["</s>"], True) == [7]
