"""Laws of the project's English: openings of docstrings and messages, and words that the project does not use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import prose


@pytest.mark.parametrize(
    "offences",
    [
        prose.questions_in_docstrings,
        prose.questions_in_messages,
        prose.metaphors_in_docstrings,
        prose.metaphors_in_pages,
        prose.silent_raisers,
    ],
)
def test_there_is_no_offence(offences: Callable[[], list[str]]) -> None:
    assert offences() == []


def test_long_sentences_are_counted() -> None:
    page = f"# Title\n\n{'word ' * 36}.\n\n```python\n{'code ' * 50}\n```\n\nTwo words. {'`a` ' * 36}."
    assert [prose.words(sentence) for sentence in prose.sentences_of(page)] == [36, 2, 36]
