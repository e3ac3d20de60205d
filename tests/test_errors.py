"""docs/errors.md names every error and warning of the package, and nothing that is gone."""

from tests.messages import documented, messages


def test_every_message_has_a_cause_and_a_remedy() -> None:
    described = documented()
    missing = [f"{place}: {text}" for text, place in messages().items() if text not in described]
    assert not missing, "`python -m tests.messages` prints the rows that docs/errors.md lacks:\n" + "\n".join(missing)


def test_no_message_is_described_that_is_gone() -> None:
    assert sorted(documented()) == sorted(messages())


def test_the_search_sees_what_users_meet() -> None:
    found = messages()
    assert "unknown option ……" in found  # an f-string
    assert any(text.startswith("the table … (… GiB) lies in pageable") for text in found)  # a logged warning
    assert any(text.startswith("page-locking … was refused") for text in found)  # a message that a function makes
