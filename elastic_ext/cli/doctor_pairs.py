"""The part of elastic-ext doctor that is done together with other nodes, and imports torch."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict

from elastic_ext.doctor.findings import Finding, findings, is_wrong, sorted_findings, tell_findings
from elastic_ext.doctor.meeting import MeetingFailed, Rendezvous
from elastic_ext.doctor.pairs import SILENCE_SECONDS, check_pairs
from elastic_ext.doctor.records import NodeHardware
from elastic_ext.doctor.report import PairReport, findings_of_report, words_of_report
from elastic_ext.errors import MasterError
from elastic_ext.master.address import MasterPlace

from .ckpt import Terminal

__all__ = ["run"]


def run(options: argparse.Namespace, terminal: Terminal, hardware: NodeHardware) -> bool:
    """Check this node together with others and tell the findings; gives whether something is wrong with any of them.

    What is wrong with this node alone was told before, and does not count here.
    """
    try:
        report, own = check_pairs(
            _rendezvous(options),
            hardware,
            say=_say,
            with_nccl=options.pair_backend == "nccl",
            silence_seconds=options.silence or SILENCE_SECONDS,
        )
    except MeetingFailed as error:
        terminal.complain(str(error))
        return True
    except ValueError as error:  # of arguments that only torch knows
        options.refuse(str(error))
    if options.json:
        terminal.tell({"record": "pairs", **asdict(report)}, "")
    terminal.say("nodes:")
    for line in words_of_report(report):
        terminal.say(f"  {line}")
    together = findings_of_report(report)
    tell_findings(terminal, together, "pairs")
    others = _of_others(report, own)
    tell_findings(terminal, others, "other node")
    is_handed_in = options.place is None or own != 0 or _hand_in(options.place, report, terminal)
    return is_wrong(together) or is_wrong(others) or not is_handed_in


def _hand_in(place: MasterPlace, report: PairReport, terminal: Terminal) -> bool:
    """Send a master the report of pairs, and say what it recommends; gives whether the master has received it."""
    from elastic_ext.master.client import MasterClient  # imports gRPC

    try:
        with MasterClient(place) as client:
            recommendations = client.report_pairs(report.to_short_json())
    except (MasterError, ValueError) as error:
        terminal.complain(str(error))
        return False
    terminal.say(f"the master at {place.address} has received the report of the pairs")
    for each in recommendations:
        terminal.say(f"  {each}")
    return True


def _of_others(report: PairReport, own: int) -> tuple[Finding, ...]:
    """The warnings and errors of nodes on other machines, with their names; those of this machine were told before."""
    machine = report.nodes[own].hardware
    boot_id = machine.system.boot_id if machine is not None else None
    return sorted_findings(
        Finding(
            severity=one.severity,
            what=f"{node.label}: {one.what}",
            why_it_matters=one.why_it_matters,
            what_to_do=one.what_to_do,
        )
        for node in report.nodes
        if node.index != own
        and node.hardware is not None
        and (boot_id is None or node.hardware.system.boot_id != boot_id)
        for one in findings(node.hardware, num_nodes=report.num_wanted)
        if is_wrong([one])
    )


def _say(words: str) -> None:
    """Tell the progress of the check on stderr."""
    with contextlib.suppress(BrokenPipeError):
        Terminal(sys.stderr, sys.stderr, as_json=False).say(f"elastic-ext doctor: {words}")
        sys.stderr.flush()


def _rendezvous(options: argparse.Namespace) -> Rendezvous:
    config = dict(options.rdzv_conf or {})
    if options.node_rank is not None:
        config["rank"] = options.node_rank
    return Rendezvous(
        endpoint=options.rdzv_endpoint,
        run_id=options.rdzv_id or "none",
        min_nodes=options.nnodes[0],
        max_nodes=options.nnodes[1],
        backend=options.rdzv_backend or "c10d",
        config=config,
        local_addr=options.local_addr,
    )
