"""Completion of command lines in a shell: a script for bash, made from a parser; zsh reads it by its bashcompinit."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["SHELLS", "Completed", "Shell", "completed", "script_for"]

Shell = Literal["bash", "zsh"]
SHELLS: Sequence[Shell] = get_args(Shell)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """The words that may follow one command of a program."""

    path: str
    """The command behind the program's name, each word after a slash, such as ``/config/set``; empty for none."""
    words: tuple[str, ...]
    """Commands below this one, and the choices of its arguments."""
    options: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    """The values that follow an option, by option; none for one whose value may be any, such as a file.

    An option that may go without a value is not among them: what follows it may be the next option.
    """


def completed(
    parser: argparse.ArgumentParser, known: Mapping[str, Sequence[str]], path: str = ""
) -> Iterator[Completed]:
    """What may follow each command of a parser; ``known`` has the words for arguments without choices, by metavar."""
    words: list[str] = []
    options: list[str] = []
    values: dict[str, tuple[str, ...]] = {}
    below: list[Completed] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += action.choices
            below += (each for name, own in action.choices.items() for each in completed(own, known, f"{path}/{name}"))
            continue
        choices = action.choices if action.choices is not None else known.get(str(action.metavar), ())
        if not action.option_strings:
            words += map(str, choices)
            continue
        named = [each for each in action.option_strings if each.startswith("--")]
        options += named
        if action.nargs not in (0, "?", "*"):
            values |= dict.fromkeys(named, tuple(map(str, choices)))
    yield Completed(path=path, words=tuple(words), options=tuple(options), values=values)
    yield from below


def script_for(shell: Shell, program: str, commands: Sequence[Completed]) -> str:
    """The script by which a shell completes the command lines of a program."""
    name = re.sub(r"\W", "_", program)
    script = _SCRIPT.format(
        program=program,
        name=name,
        paths="|".join(each.path for each in commands if each.path) or "/",
        values="\n".join(_values(commands)),
        words="\n".join(
            f"        '{each.path}') words='{' '.join(each.words)}' options='{' '.join(each.options)}' ;;"
            for each in commands
        ),
    )
    return (_ZSH if shell == "zsh" else "") + script


def _values(commands: Sequence[Completed]) -> Iterator[str]:
    """A branch of the script for each set of values that options have in common."""
    by_values: dict[tuple[str, ...], list[str]] = {}
    for each in commands:
        for option, values in each.values.items():
            by_values.setdefault(values, []).append(f"'{each.path} {option}'")
    for values, patterns in by_values.items():
        yield f"        {'|'.join(patterns)}) is_value=1 words='{' '.join(values)}' ;;"


_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
# The completion of {program}; it is made by: elastic-ext completion
_{name}() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
    local place= words= options= is_value= has_equals= i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$place/${{COMP_WORDS[i]}}" in
            {paths}) place=$place/${{COMP_WORDS[i]}} ;;
        esac
    done
    if [[ $place == /run ]] && type _elastic_run >/dev/null 2>&1; then
        COMP_WORDS=(elastic-run "${{COMP_WORDS[@]:2}}")
        COMP_CWORD=$((COMP_CWORD - 1))
        _elastic_run
        return
    fi
    if [[ $cur == = ]]; then
        cur= has_equals=1
    elif [[ $prev == = ]]; then
        prev=${{COMP_WORDS[COMP_CWORD-2]}} has_equals=1
    fi
    case "$place" in
{words}
    esac
    case "$place $prev" in
{values}
    esac
    if [[ -n $is_value && $prev == --job ]]; then
        words=$(command ls "${{XDG_CACHE_HOME:-$HOME/.cache}}/elastic_ext" 2>/dev/null)
    fi
    if [[ -n $has_equals && -z $is_value ]]; then
        words=
    elif [[ $cur == -* && -z $is_value ]]; then
        words=$options
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ ${{COMPREPLY[0]}} == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi
}}
complete -o bashdefault -o default -F _{name} {program}
"""
