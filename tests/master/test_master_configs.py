"""A job's config book: one history, whoever writes."""

from __future__ import annotations

import pytest

from elastic_ext.config.elastic_config import ElasticConfig
from elastic_ext.config.history import ConfigEdit
from elastic_ext.errors import ConfigError
from elastic_ext.master.configs import Author, AuthoredVersion, ConfigBook, StaleVersion


def write(
    book: ConfigBook, rate: float, *, reason: str = "a try", author: Author = "person", made_from: int | None = None
) -> AuthoredVersion:
    edit = ConfigEdit({"optimizer.learning_rate": rate}, reason=reason)
    authored = book.propose(edit, now=1.0, author=author, made_from=made_from)
    book.enter(authored)
    return authored


def test_versions_follow_each_other_and_keep_their_reasons() -> None:
    book = ConfigBook()
    assert book.version == 0 and book.newest is None
    write(book, 0.1)
    write(book, 0.2, reason="better")
    assert [each.config.version for each in book.versions] == [1, 2]
    assert book.newest is not None and book.newest.config.reason == "better"


def test_what_is_made_is_not_in_the_book_before_it_is_entered() -> None:
    book = ConfigBook()
    book.propose(ConfigEdit({"optimizer.learning_rate": 0.1}), now=1.0)
    assert book.version == 0


def test_a_generated_version_is_late_once_a_person_has_written_another() -> None:
    book = ConfigBook()
    write(book, 0.1)
    write(book, 0.2, author="generated", made_from=1)
    write(book, 0.3)
    with pytest.raises(StaleVersion, match="made from version 2, and version 3 is the newest"):
        write(book, 0.4, author="generated", made_from=2)
    assert book.version == 3


def test_an_undo_is_a_version_too_and_goes_further_back_each_time() -> None:
    book = ConfigBook()
    for rate in (0.1, 0.2, 0.3):
        write(book, rate)
    for rate in (0.2, 0.1):
        authored = book.propose_undo(now=2.0)
        book.enter(authored)
        assert authored.config.optimizer.learning_rate == rate
    book.enter(book.propose_undo(now=2.0))
    assert book.version == 6 and book.newest is not None and book.newest.config.values() == {}
    with pytest.raises(ConfigError, match="no earlier version"):
        book.propose_undo(now=3.0)


def test_what_is_refused_changes_nothing() -> None:
    book = ConfigBook()
    with pytest.raises(ConfigError, match="learning_rate"):
        write(book, -1.0)
    assert book.version == 0


def test_what_a_node_has_in_its_file_is_taken_if_it_is_newer() -> None:
    book = ConfigBook()
    write(book, 0.1)
    text = ElasticConfig.from_values({"optimizer.learning_rate": 0.5}, version=7, reason="by hand").to_json()
    authored = book.propose_from_file(text, node_id="a", now=2.0)
    assert authored is not None and authored.author == "node" and authored.node_id == "a"
    book.enter(authored)
    assert book.version == 7 and book.propose_from_file(text, node_id="b", now=3.0) is None
    assert write(book, 0.6).config.version == 8
    with pytest.raises(ConfigError):
        book.propose_from_file("{", node_id="a", now=4.0)


def test_other_contents_under_one_version_are_told_of_once_and_decided_by_nobody() -> None:
    book = ConfigBook()
    authored = write(book, 0.1)
    assert book.conflict(1, authored.config.digest, "a") is None
    assert "different configs under version 1" in str(book.conflict(1, "0" * 64, "a"))
    assert book.conflict(1, "0" * 64, "a") is None and book.conflict(1, "0" * 64, "b") is not None
    write(book, 0.2)
    assert book.conflict(1, "0" * 64, "a") is None, "it is over"


def test_the_book_keeps_so_many_versions_and_no_more() -> None:
    book = ConfigBook()
    for _ in range(250):
        write(book, 0.1)
    assert len(book.versions) == 200 and book.version == 250
