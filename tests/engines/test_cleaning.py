"""Test the cleaning of texts that a language model writes on request."""

import pytest

from foretrace.engines.cleaning import Selection, clean


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [
        ("It rains.", True, "It rains."),
        ("hey what's up", True, "hey what's up"),
        ("hey what's up", False, ""),
        ("It rains. We stay at ho", False, "It rains."),
        ('He said "Go." Then he we', False, 'He said "Go."'),
        ("下雨了。我们", False, "下雨了。"),
        ('Here is a text:\n\n"It rains."', True, "It rains."),
        ("Sure! A sentence:\nIt\nrains.", True, "It rains."),
        ("Sentence: It rains.", True, "It rains."),
        ("Sure! Here's one: It rains.", True, "It rains."),
        ("1. It rains.\n- It pours.", True, "It rains. It pours."),
        ("**It rains.**", True, "It rains."),
        ('"It rains', True, "It rains"),
        ('"Go," he said, "now."', True, '"Go," he said, "now."'),
        ("", True, ""),
        ("Here it is:", True, ""),
    ],
)
def test_what_is_not_part_of_a_text_is_removed(text: str, finished: bool, expected: str) -> None:
    assert clean(text, finished=finished) == expected


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("The cat sleeps on the roof.", None),
        ("Too short", "empty or cut off"),
        ("As an AI, I have no dog.", "refusals"),
        ("I\u2019m sorry, but I can\u2019t do that here.", "refusals"),
        ("I cannot write such a text.", "refusals"),
        ("I'm sorry to hear about your dog.", None),
        ("You told me to write one sentence about it.", "echoes of the instruction"),
        ("They told me about a dog. It must be old.", None),
        ("This one is quite formal.", "echoes of the instruction"),
        ("Dear [Name], thank you.", "placeholders"),
        ("The dog sleeps on the warm stone floor.", "near duplicates"),
    ],
)
def test_texts_of_no_use_are_found(text: str, fault: str | None) -> None:
    selection = Selection("Write one sentence about \n. It must be formal.", "quite formal")
    assert selection.fault("The dog sleeps on the warm floor.") is None
    assert selection.fault(text) == fault
