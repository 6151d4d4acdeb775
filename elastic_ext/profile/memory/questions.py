"""What the analysis process is asked and answers, as JSON, and where it finds the user's functions. Needs no torch."""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ext.errors import ElasticError
from elastic_ext.records.json import JsonRecord
from elastic_ext.records.metrics import PassesMemory

__all__ = [
    "IS_ANALYSIS",
    "AnalysisRequest",
    "MainModule",
    "MemoryAnswer",
    "OptimizerKind",
    "Origin",
    "ParameterKind",
    "Question",
    "origin_of",
    "refuse_in_analysis",
]


# --- where a function of the user's is defined, so that another process can find it without a pickle -----------------
# A script that was started is imported there as multiprocessing does it: under another name than ``__main__``, so that
# what stands under ``if __name__ == "__main__":`` is left alone.

_MAIN, _IMPORTED_MAIN = "__main__", "__mp_main__"
_WHY = "another process has to find it by its module and name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin(JsonRecord):
    """Where a function or a class is defined: its module, and its name there."""

    module: str
    name: str
    """The name of the function or class in the module, with dots where it is in a class."""

    def find(self) -> Any:
        """The function or class, imported in this process; ImportError or AttributeError where it is not there."""
        found: Any = sys.modules[_MAIN] if self.module == _MAIN else importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class MainModule(JsonRecord):
    """The script that a process was started with: a module's name, or a file."""

    name: str | None = None
    path: str | None = None

    def take_up(self) -> None:
        """Load the script as this process's ``__main__`` too, without its main part."""
        module = types.ModuleType(_IMPORTED_MAIN)
        if self.name is not None:
            found = runpy.run_module(self.name, run_name=_IMPORTED_MAIN, alter_sys=True)
        else:
            assert self.path is not None
            found = runpy.run_path(self.path, run_name=_IMPORTED_MAIN)
        module.__dict__.update(found)
        sys.modules[_MAIN] = sys.modules[_IMPORTED_MAIN] = module


def origin_of(argument: str, given: object) -> tuple[Origin, MainModule | None]:
    """Where ``given`` is defined, and the script if that defines it; ValueError where no other process can find it.

    ``argument`` is the name of the parameter that it was given as, for errors.
    """
    if not callable(given):
        raise ValueError(f"{argument} is {given!r}; allowed: a function or class at the top of a module, or None")
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError(f"{argument} is a {type(given).__name__}, and {_WHY}; give a function at the top of a module")
    if "<" in name:
        kind = "a lambda" if "<lambda>" in name else "defined inside a function"
        raise ValueError(f"{argument} is {kind} ({module}.{name}), and {_WHY}; define it at the top of a module")
    try:
        is_there = Origin(module=module, name=name).find() is given
    except (ImportError, AttributeError, KeyError):
        is_there = False
    if not is_there:
        raise ValueError(
            f"{argument} is called {module}.{name}, but importing that name gives another object, and {_WHY}; give a "
            "function or class as it stands at the top of a module"
        )
    return Origin(module=module, name=name), _main(argument) if module == _MAIN else None


def _main(argument: str) -> MainModule:
    main = sys.modules[_MAIN]
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).is_file():
        raise ValueError(
            f"{argument} is defined in a notebook, or in what was typed, which another process cannot import; put it "
            "in a module of its own and import it from there"
        )
    if not _has_main_part(Path(path)):
        raise ValueError(
            f'{argument} is defined in {path}, which has no `if __name__ == "__main__":`, so that importing it would '
            "train again; put training under such a line, or the function in a module of its own"
        )
    name = None if spec is None else spec.name
    return MainModule(name=name) if name is not None else MainModule(path=str(Path(path).absolute()))


def _has_main_part(path: Path) -> bool:
    """Whether a script keeps what it does when it is started under a test of ``__name__``."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare):
            compared = [node.test.left, *node.test.comparators]
            names = {part.id for part in compared if isinstance(part, ast.Name)}
            texts = {part.value for part in compared if isinstance(part, ast.Constant)}
            if "__name__" in names and _MAIN in texts:
                return True
    return False


# --- what is asked of the process that works out a model's memory, and what it answers, one line of JSON each --------

IS_ANALYSIS = "ELASTIC_EXT_IS_ANALYSIS"
"""The name of a variable in the environment of the analysis process: no trainer is made there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterKind:
    """A parameter of the trained model, by name, shape and dtype; whole, whatever part of it a rank has."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """The settings of an optimizer that is one of torch's own."""

    name: str
    groups: tuple[Mapping[str, Any], ...]
    """The settings of each parameter group, with the names of its parameters under ``params``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(JsonRecord):
    """A model, its inputs and optimizers, and the sizes of steps whose memory is to be worked out."""

    main: MainModule | None
    """The script that has the factory or the loss, if it is one."""
    factory: Origin
    loss: Origin | None
    parameters: tuple[ParameterKind, ...]
    is_training: bool
    """Whether the model is in training mode."""
    autocast: str | None
    """The type that passes are computed in, where autocast is on."""
    given: Mapping[str, Any]
    """Positional arguments of the model, as model_description.py tells them."""
    options: Mapping[str, Any]
    """Named arguments of the model, as model_description.py tells them."""
    batch: Mapping[str, Any] | None
    """The batch, as model_description.py tells it, like the arguments ``given`` and ``options`` of the model."""
    keeps_outputs: bool
    """Whether the loop holds on to the model's outputs while the backward pass runs."""
    blocks: tuple[str, ...]
    """Names of the model's blocks."""
    micro_batches: tuple[int, ...]
    """Samples per micro-batch of the steps to work out."""
    ratios: tuple[float, ...]
    """Shares of blocks that are computed again; the first is tried with all sizes before the others."""
    optimizers: tuple[OptimizerKind, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisRequest(JsonRecord):
    """A question to the analysis process, and where this process finds the user's code."""

    path: tuple[str, ...]
    """The folders where modules are looked for."""
    argv: tuple[str, ...]
    folder: str
    question: Question


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAnswer(JsonRecord):
    """One line of the analysis process's answers: what it has found since the line before."""

    passes: PassesMemory | None = None
    update_bytes: int | None = None
    flops_per_sample: int | None = None
    block_activation_bytes: tuple[int, ...] = ()
    """Bytes that each block keeps of one sample for the backward pass."""
    problem: str | None = None
    """Why some of what was asked has no answer; only the last line has one, and only where that is so."""


def refuse_in_analysis(environment: Mapping[str, str]) -> None:
    """Raise in the analysis process where a script, imported for its model_factory, begins to train."""
    if IS_ANALYSIS in environment:
        raise ElasticError(
            "this process imports the script for its model_factory; put training under "
            'if __name__ == "__main__":, or the factory in a module of its own'
        )
