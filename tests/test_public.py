"""What `import elastic_ext` offers is what it was: every public name with its bases, what it is called with, and those
of its members that the documentation shows. Lines are added to tests/saved/public.json, and changed on purpose alone.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
_SAVED = json.loads((ROOT / "tests" / "saved" / "public.json").read_text())
PINNED: Mapping[str, Mapping[str, str]] = _SAVED["names"]
SECTIONS: Mapping[str, str] = _SAVED["sections"]
OURS = "elastic_ext"


def call(of: Any) -> str:
    """What it is called with: names, order and defaults. Types are mypy's to hold to, in the code that uses them."""
    parameters = [each.replace(annotation=each.empty) for each in inspect.signature(of).parameters.values()]
    return re.sub(r" at 0x\w+", "", str(inspect.Signature(parameters)))


def described(of: Any) -> dict[str, str]:
    """A public name, and what of its members is written in this library, in words that say what callers rely on."""
    if not isinstance(of, type):
        return {"": call(of)}
    public = {name.rpartition(".")[2] for name in PINNED}
    bases = [each for each in of.__mro__[1:] if each.__module__.partition(".")[0] != OURS or each.__name__ in public]
    told = {"": f"class({', '.join(each.__name__ for each in bases if each is not object)})"}
    own = [each for each in of.__mro__ if each.__module__.partition(".")[0] == OURS]
    if any("__init__" in vars(each) for each in own) and not getattr(of, "_is_protocol", False):
        told["__init__"] = call(of)
    for name in sorted({name for each in own for name in vars(each) if not name.startswith("_")}):
        member = inspect.getattr_static(of, name)
        if isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
            told[name] = f"{'' if inspect.isfunction(member) else type(member).__name__ + ' '}{call(getattr(of, name))}"
        else:
            told[name] = "property" if isinstance(member, property) else "value"
    return told


def documented() -> Iterator[tuple[str, frozenset[str], frozenset[str] | None]]:
    """The names of docs/api/, each with members that it leaves out and, where it names some, those that it shows."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md"))]
    for block in re.split(r"\n(?=\.\. auto)", "\n".join(pages)):
        if (match := re.match(r"\.\. auto(?:class|function|exception):: elastic_ext\.(\S+)", block)) is None:
            continue
        left_out = re.search(r":exclude-members: (.*)", block)
        shown = frozenset(re.findall(r"\n   \.\. auto\w+:: (\w+)", block)) if ":no-members:" in block else None
        yield match[1], frozenset(left_out[1].split(", ") if left_out else ()), shown


def found(name: str) -> Any:
    """By the path that the documentation gives."""
    module, _, last = f"{OURS}.{name}".rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", PINNED)
def test_a_public_name_is_called_as_it_was_and_has_the_members_that_it_had(name: str) -> None:
    now = described(found(name))
    assert {member: now.get(member, "gone") for member in PINNED[name]} == PINNED[name]


def test_every_name_that_the_package_offers_has_a_place_on_one_page() -> None:
    on_pages = [name for name, _, _ in documented()]
    assert sorted(name for name in on_pages if "." not in name) == sorted(importlib.import_module(OURS).__all__)


def test_every_name_of_the_pages_is_pinned_with_the_members_that_it_shows() -> None:
    missing = []
    for name, left_out, shown in documented():
        if name.endswith("Section"):  # found through the config, below, and not by an internal module's path
            continue
        of = found(name)
        members = {
            member
            for member in described(of)
            if member in ("", "__init__")
            or (member in shown if shown is not None else member not in left_out and has_words(of, member))
        }
        missing += [f"{name}: {member}" for member in sorted(members - PINNED.get(name, {}).keys())]
    assert not missing, "add these to tests/saved/public.json, or leave them out of docs/api/"


def has_words(of: type, name: str) -> bool:
    """Whether its page has a place for it: a docstring, or a value of a class of values."""
    member = inspect.getattr_static(of, name)
    if isinstance(member, property) or callable(getattr(of, name)):
        return bool(inspect.getdoc(member))
    return isinstance(member, types.MemberDescriptorType)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_of_the_config_has_the_fields_that_it_had(name: str) -> None:
    section = getattr(found("ElasticConfig")(version=1), name)
    assert call(type(section)) == SECTIONS[name] and type(section)() == section
