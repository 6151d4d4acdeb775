"""The arguments of `ckpt export` and `ckpt convert`, which take a checkpoint elsewhere, and what is read from them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

__all__ = ["DTYPES", "ONLY_TO", "add_arguments_of_convert", "add_arguments_of_export", "pair_of", "path_of", "size_of"]

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)(i?)B?", re.IGNORECASE)


def add_arguments_of_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dest", type=path_of, metavar="DEST", help="the folder to write into; it may hold a config and a tokenizer"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="the type of floating-point numbers; default: as saved")
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        type=pair_of,
        metavar="PATTERN=REPLACEMENT",
        help="change names as re.sub does; several are done one after another",
    )
    parser.add_argument(
        "--strip-prefix", action="append", default=[], metavar="PREFIX", help="take it off the names that have it"
    )
    parser.add_argument(
        "--tied",
        choices=("all", "once"),
        default="all",
        help="write a tensor with several names under each of them (for from_pretrained and load_state_dict), or once "
        "(for safetensors.torch.load_model)",
    )
    parser.add_argument(
        "--max-shard-size", type=size_of, default="5GB", metavar="SIZE", help="of one file, such as 5GB or 500MiB"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export in DEST")


ONLY_TO = {"dcp": ("first", "force"), "elastic": ("job", "step", "optimizer", "tied")}
"""The arguments of `ckpt convert` that one direction has alone."""


def add_arguments_of_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", choices=tuple(ONLY_TO), required=True, help="what to make of it")
    parser.add_argument(
        "dest", type=path_of, metavar="DEST", help="a folder that is not there yet; of elastic: a shared_storage_path"
    )
    parser.add_argument(
        "--model-key", default="model", metavar="KEY", help='the model\'s in the state dict; "" for all'
    )
    parser.add_argument("--optim-key", default="optim", metavar="KEY", help="the optimizers' in the state dict")
    to_dcp = parser.add_argument_group("to dcp")
    to_dcp.add_argument(
        "--first",
        action="append",
        default=[],
        metavar="NAME",
        help="of the names of a tied parameter, the one that model.named_parameters() has",
    )
    to_dcp.add_argument("--force", action="store_true", help="replace a folder that dcp.save has made")
    to_elastic = parser.add_argument_group("to elastic")
    to_elastic.add_argument("--job", help="the job that is to go on from it; needed")
    to_elastic.add_argument("--step", type=int, help="at which it was saved, where the folder does not say so")
    to_elastic.add_argument(
        "--optimizer", action="append", default=[], metavar="CLASS", help="of the training that goes on, such as AdamW"
    )
    to_elastic.add_argument(
        "--tied", action="append", default=[], type=pair_of, metavar="NAME=NAME", help="two names of one parameter"
    )


def path_of(text: str) -> Path:
    """A path; not '', which would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError(
            "it is '', as where a variable is not set; allowed: a path, and '.' for the current folder"
        )
    return Path(text)


def pair_of(text: str) -> tuple[str, str]:
    """``A=B``, cut at the last equals sign: a pattern may have some, and names have none."""
    first, equals, second = text.rpartition("=")
    if not first or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form A=B")
    return first, second


def size_of(text: str) -> int:
    """Bytes: ``5GB`` are 5 * 10**9, ``5GiB`` 5 * 2**30."""
    found = _SIZE.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; allowed: such as 5GB, 500MiB or 1000000")
    base = 1024 if found[3] else 1000
    return max(1, int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " ")))
