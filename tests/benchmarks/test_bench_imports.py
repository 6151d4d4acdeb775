"""What the benchmark of imports reads: each import in an interpreter of its own."""

from __future__ import annotations

import torch

from benchmarks.imports import STATEMENTS, imported


def test_a_statement_is_imported_where_neither_torch_nor_the_library_is_yet() -> None:
    read = imported("import sys; assert not {'torch', 'elastic_ext'} & set(sys.modules)")
    assert read.value > 0 and read.work == torch.__version__


def test_torch_is_what_all_are_read_beside() -> None:
    assert next(iter(STATEMENTS)) == "import torch"
    assert STATEMENTS["from elastic_ext import ElasticTrainer"] == 1.15
