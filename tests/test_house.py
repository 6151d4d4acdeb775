"""The rules of the house, checked in the syntax trees of the library: which way imports go, what stays free of torch,
which names are public, and what is written nowhere.

Every check is a function from source texts to faults in words, and is tried on small texts that break its rule.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import elastic_ext

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "elastic_ext"
FRONT = "__init__"  # the package's own file: it may name anything, and imports nothing until asked

LAYERS: Mapping[str, int] = {
    # 0: the standard library and layer 0
    "config": 0,
    "errors": 0,
    "fsdp.checkpoint": 0,
    "fsdp.checkpoint.dtypes": 0,
    "fsdp.checkpoint.jsontext": 0,
    "fsdp.checkpoint.strided": 0,
    "fsdp.checkpoint.formats": 0,
    "fsdp.checkpoint.views": 0,
    "given": 0,
    "keys": 0,
    "job_facts": 0,
    "metrics": 0,
    "record_json": 0,
    "rules": 0,
    "sections": 0,
    "settings": 0,
    "version": 0,
    "strict_json": 0,
    "wording": 0,
    # 1: one job each
    "accelerator": 1,
    "agent": 1,
    "agent.arguments": 1,
    "agent.asking": 1,
    "agent.at_start": 1,
    "agent.at_start.sitecustomize": 1,
    "agent.board": 1,
    "doctor.cgroups": 1,
    "agent.contact": 1,
    "agent.control": 1,
    "doctor.machine": 1,
    "doctor.machine_gpus": 1,
    "doctor.finding": 1,
    "agent.folder": 1,
    "doctor.gpus": 1,
    "agent.hanging": 1,
    "doctor.hardware": 1,
    "doctor.hardware_records": 1,
    "doctor.matching": 1,
    "agent.duties": 1,
    "agent.environment": 1,
    "agent.failures": 1,
    "agent.internals": 1,
    "agent.journal": 1,
    "agent.losses": 1,
    "agent.membership": 1,
    "agent.monitor": 1,
    "agent.places": 1,
    "agent.refusals": 1,
    "agent.rendezvous": 1,
    "agent.slow_workers": 1,
    "agent.starting": 1,
    "agent.stop_signals": 1,
    "agent.backoff": 1,
    "agent.config_watch": 1,
    "agent.event_files": 1,
    "agent.events_command": 3,
    "agent.held_config": 1,
    "agent.link_words": 1,
    "agent.master_choice": 1,
    "agent.master_link": 1,
    "agent.master_session": 1,
    "agent.node_identity": 1,
    "agent.node_report": 1,
    "agent.outbox": 1,
    "agent.own_master": 1,
    "agent.verdicts": 1,
    "agent.workers": 1,
    "doctor.mounts": 1,
    "doctor.pair_meeting": 1,
    "doctor.pair_probe": 1,
    "doctor.pair_report": 1,
    "doctor.pairs": 1,
    "doctor.patience": 1,
    "agent.processes": 1,
    "agent.records": 1,
    "agent.sampling": 1,
    "agent.stacks": 1,
    "agent.status": 1,
    "agent.status_files": 1,
    "agent.status_profile": 1,
    "agent.status_words": 1,
    "doctor.stragglers": 1,
    "agent.traces": 1,
    "agent.tuner": 1,
    "agree": 1,
    "appliers": 1,
    "control_word": 1,
    "decide": 1,
    "doctor": 1,
    "exchange": 1,
    "files": 1,
    "folder_events": 1,
    "forks": 1,
    "fixed_sharding": 1,
    "follow": 1,
    "history": 1,
    "knobs": 1,
    "engine": 1,
    "outputs": 1,
    "pacing": 1,
    "profile": 1,
    "profile.asking": 1,
    "profile.bottleneck": 1,
    "profile.cause_words": 1,
    "profile.causes": 1,
    "profile.changing": 1,
    "profile.device_timeline": 1,
    "profile.pace": 1,
    "profile.line": 1,
    "profile.memory_lines": 1,
    "profile.origins": 1,
    "profile.phases": 1,
    "profile.questions": 1,
    "profile.reading": 1,
    "profile.showing": 1,
    "profile.sinks": 1,
    "profile.spans": 1,
    "profile.straggling": 1,
    "profile.summary": 1,
    "profile.tally": 1,
    "profile.timeline": 1,
    "profile.weighed": 1,
    "profile.windows": 1,
    "own_stacks": 1,
    "peers": 1,
    "leaving": 1,
    "master": 1,
    "master.__main__": 3,
    "master.admission": 1,
    "master.allowances": 1,
    "master.amounts": 1,
    "master.arguments": 1,
    "master.asking": 1,
    "config_command": 3,
    "master.client": 1,
    "master.cluster": 1,
    "master.collector": 1,
    "master.commands": 3,
    "master.configs_of_master": 1,
    "master.job_words": 1,
    "master.named": 1,
    "master.configs": 1,
    "master.event_log": 1,
    "master.facts_told": 1,
    "master.fleet": 1,
    "master.freed": 1,
    "master.guard": 1,
    "master.health": 1,
    "master.job": 1,
    "master.links": 1,
    "master.memory_command": 3,
    "master.memory_table": 1,
    "master.memory_words": 1,
    "master.metrics_server": 1,
    "master.prometheus": 1,
    "master.machines": 1,
    "master.nodes": 1,
    "master.places": 1,
    "master.planning": 1,
    "master.plans": 1,
    "master.points": 1,
    "master.process": 3,
    "master.records": 1,
    "master.reported": 1,
    "master.service": 1,
    "master.seeing": 1,
    "master.shown": 1,
    "master.slow_ranks": 1,
    "master.status": 1,
    "master.store": 1,
    "master.strategy": 1,
    "master.strategy.advice": 1,
    "master.strategy.book": 1,
    "master.strategy.budget": 1,
    "master.strategy.change": 1,
    "master.strategy.columns": 1,
    "master.strategy.controller": 1,
    "master.strategy.course": 1,
    "master.strategy.decisions": 1,
    "master.strategy.doubt": 1,
    "master.strategy.growth": 1,
    "master.strategy.limits": 1,
    "master.strategy.measuring": 1,
    "master.strategy.memory": 1,
    "master.strategy.model": 1,
    "master.strategy.resizing": 1,
    "master.strategy.search": 1,
    "master.strategy.seen": 1,
    "master.strategy.shape": 1,
    "master.strategy.size_tries": 1,
    "master.strategy.sizes": 1,
    "master.strategy.space": 1,
    "master.strategy.standing": 1,
    "master.strategy.switching": 1,
    "master.strategy.telling": 1,
    "master.tokens": 1,
    "master.topology": 1,
    "master.tuning": 1,
    "master.tuning_command": 3,
    "master.tuning_words": 1,
    "master.unsaved": 1,
    "master.watchers": 1,
    "master.wire": 1,
    "master.wire.master_pb2": 1,
    "master.wire.master_pb2_grpc": 1,
    "master.wire.plain": 1,
    "launch_size": 1,
    "loader_workers": 1,
    "ranks": 1,
    "rounds": 1,
    "pulse": 1,
    "rates": 1,
    "remarks": 1,
    "reports": 1,
    "rundir": 1,
    "profile.history_of_run": 1,
    "profile.ledger": 1,
    "report": 1,
    "report.bins": 1,
    "report.columns": 1,
    "report.effects": 1,
    "report.entries": 1,
    "report.frame": 1,
    "report.gathering": 1,
    "report.judging": 1,
    "report.known": 1,
    "report.happenings": 1,
    "report.heat_chart": 1,
    "report.lanes": 1,
    "report.line_charts": 1,
    "report.lines": 1,
    "report.markup": 1,
    "report.numbers": 1,
    "report.opening": 1,
    "report.page": 1,
    "report.places": 1,
    "report.ranks": 1,
    "report.record": 1,
    "report.scales": 1,
    "report.script": 1,
    "report.stack_chart": 1,
    "report.speeds": 1,
    "report.style": 1,
    "report.tables": 1,
    "watch": 1,
    "weighing": 1,
    "accumulate": 1,
    "averaging": 1,
    "batches": 1,
    "clipping": 1,
    "counts": 1,
    "device_memory": 1,
    "interval": 1,
    "progress": 1,
    "tampering": 1,
    "loop_checks": 3,
    "loss_graph": 1,
    "finite_gradients": 1,
    "gradient_pairs": 1,
    "hooks": 1,
    "internals": 1,
    "learning": 1,
    "noise_scale": 1,
    "out_of_memory": 1,
    "pipelines": 1,
    "positions": 1,
    "same_loading": 1,
    "samplers": 1,
    "scaling": 1,
    "schedule_lengths": 1,
    "sharing": 1,
    "sharing_ways": 1,
    "sources": 1,
    "step_state": 1,
    "trained_parameters": 1,
    "fsdp.layout": 1,
    "fsdp.freight": 1,
    "fsdp.hook_order": 1,
    "fsdp.moves": 1,
    "fsdp.packed": 1,
    "fsdp.placements": 1,
    "fsdp.plan": 1,
    "fsdp.regions": 1,
    "fsdp.transition": 1,
    "fsdp.checkpoint.background": 1,
    "fsdp.checkpoint.hostmemory": 1,
    "fsdp.checkpoint.launched": 1,
    "fsdp.checkpoint.blocksums": 1,
    "fsdp.checkpoint.casting": 1,
    "fsdp.checkpoint.claim": 1,
    "fsdp.checkpoint.clearing": 1,
    "fsdp.checkpoint.commit": 1,
    "fsdp.checkpoint.inventory": 1,
    "fsdp.checkpoint.jobfolder": 1,
    "fsdp.checkpoint.jobname": 1,
    "fsdp.checkpoint.letters": 1,
    "fsdp.checkpoint.lineage": 1,
    "data": 1,
    "data.cursor": 1,
    "data.order": 1,
    "data.place": 1,
    "data.late": 1,
    "data.copied": 1,
    "data.stream": 1,
    "data.turns": 1,
    "fsdp.checkpoint.listing": 1,
    "fsdp.checkpoint.meta": 1,
    "fsdp.checkpoint.parts": 1,
    "fsdp.checkpoint.pickled": 1,
    "fsdp.checkpoint.reading": 1,
    "fsdp.checkpoint.removing": 1,
    "fsdp.checkpoint.retain": 1,
    "fsdp.checkpoint.shardfile": 1,
    "fsdp.checkpoint.shardreader": 1,
    "fsdp.checkpoint.shardstream": 1,
    "fsdp.checkpoint.shardwriter": 1,
    "fsdp.checkpoint.storage": 1,
    "fsdp.checkpoint.together": 1,
    "fsdp.checkpoint.visiting": 1,
    "fsdp.checkpoint.windows": 1,
    # 2: parts of training, which know nothing of one another
    "amp": 2,
    "arguments": 2,
    "data.ahead": 2,
    "data.choosing": 2,
    "data.epochs": 2,
    "data.following": 2,
    "data.indexed": 2,
    "data.pinning": 2,
    "data.seeding": 2,
    "data.streamed": 2,
    "data.streams": 2,
    "data.loader": 2,
    "data.making": 2,
    "data.recut": 2,
    "data.refusing": 2,
    "data.sampler": 2,
    "data.child": 2,
    "data.crew": 2,
    "data.dealing": 2,
    "data.forking": 2,
    "data.frames": 2,
    "data.internals": 2,
    "data.nursery": 2,
    "data.pool": 2,
    "data.process": 2,
    "data.spawner": 2,
    "data.tasks": 2,
    "data.worker": 2,
    "gradients": 2,
    "growing": 2,
    "model_report": 2,
    "profile.analyzing": 2,
    "profile.block_watch": 2,
    "profile.calibrating": 2,
    "profile.census": 2,
    "profile.fake": 2,
    "profile.held": 2,
    "profile.likeness": 2,
    "profile.live_bytes": 2,
    "profile.memory_samples": 2,
    "profile.model_sizes": 2,
    "profile.probe": 2,
    "profile.questioning": 2,
    "profile.recorder": 2,
    "profile.recording": 2,
    "profile.surveying": 2,
    "profile.tracing": 2,
    "guarding": 2,
    "optimizer": 2,
    "optimizer_state": 2,
    "scheduler": 2,
    "overlap": 2,
    "snapshot": 2,
    "fsdp": 2,
    "fsdp.blocks": 2,
    "fsdp.cargo": 2,
    "fsdp.carrier": 2,
    "fsdp.companions": 2,
    "fsdp.dtypes": 2,
    "fsdp.fsdp2": 2,
    "fsdp.holders": 2,
    "fsdp.internals": 2,
    "fsdp.live": 2,
    "fsdp.names": 2,
    "fsdp.optim_groups": 2,
    "fsdp.optim_state": 2,
    "fsdp.plain": 2,
    "fsdp.random_state": 2,
    "fsdp.recognise": 2,
    "fsdp.refusals": 2,
    "fsdp.replica": 2,
    "fsdp.rewire": 2,
    "fsdp.spread": 2,
    "fsdp.state": 2,
    "fsdp.trained": 2,
    "fsdp.units": 2,
    "fsdp.checkpoint.checkpointer": 2,
    "fsdp.checkpoint.collecting": 2,
    "fsdp.checkpoint.complete": 2,
    "fsdp.checkpoint.comparing": 2,
    "fsdp.checkpoint.differing": 2,
    "fsdp.checkpoint.contents": 2,
    "fsdp.checkpoint.convert": 2,
    "fsdp.checkpoint.dcpforeign": 2,
    "fsdp.checkpoint.dcpincoming": 2,
    "fsdp.checkpoint.dcpplan": 2,
    "fsdp.checkpoint.dcpreader": 2,
    "fsdp.checkpoint.dcprecord": 2,
    "fsdp.checkpoint.savedvalues": 2,
    "fsdp.checkpoint.dcpwriter": 2,
    "fsdp.checkpoint.described": 2,
    "fsdp.checkpoint.export": 2,
    "fsdp.checkpoint.exportfolder": 2,
    "fsdp.checkpoint.exportplan": 2,
    "fsdp.checkpoint.jobcheckpoints": 2,
    "fsdp.checkpoint.livesaver": 2,
    "fsdp.checkpoint.loader": 2,
    "fsdp.checkpoint.memory": 2,
    "fsdp.checkpoint.opened": 2,
    "fsdp.checkpoint.restorer": 2,
    "fsdp.checkpoint.run": 2,
    "fsdp.checkpoint.copying": 2,
    "fsdp.checkpoint.meeting": 2,
    "fsdp.checkpoint.samples": 2,
    "fsdp.checkpoint.saver": 2,
    "fsdp.checkpoint.shelf": 2,
    "fsdp.checkpoint.shelved": 2,
    "fsdp.checkpoint.versions": 2,
    "fsdp.checkpoint.staging": 2,
    "fsdp.checkpoint.writing": 2,
    "fsdp.checkpoint.streamed": 2,
    "fsdp.checkpoint.todcp": 2,
    "fsdp.checkpoint.verifying": 2,
    # 3: what joins them
    "agent.status_command": 3,
    "report.command": 3,
    "doctor.command": 3,
    "agent.elastic_agent": 3,
    "agent.launcher": 3,
    "agent.persisting": 3,
    "agent.warden": 3,
    "doctor.pair_command": 3,
    "checkpoints": 3,
    "ckpt": 3,
    "ckpt.commands": 3,
    "ckpt.convert": 3,
    "ckpt.export": 3,
    "ckpt.ls": 3,
    "ckpt.places": 3,
    "ckpt.taking": 3,
    "ckpt.prune": 3,
    "ckpt.show": 3,
    "ckpt.summary": 3,
    "ckpt.terminal": 3,
    "ckpt.verify": 3,
    "attempts": 3,
    "parallelism": 3,
    "preparing": 3,
    "profile.analysis": 3,
    "profile.analysis_process": 3,
    "pulsing": 3,
    "registered": 3,
    "resuming": 3,
    "saves": 3,
    "held_copies": 3,
    "saving": 3,
    "training_state": 3,
    "session": 3,
    "speed": 3,
    "contexts": 3,
    "facts": 3,
    "run": 3,
    "steps": 3,
    "own_positions": 3,
    "taking_part": 3,
    "trainer": 3,
    "undoing": 3,
    # 4: the entry points
    "cli": 4,
}
SIDEWAYS = (0, 1, 3)  # the layers whose modules may import one another, without a circle; in 2 within a folder

USES_TORCH = frozenset(
    {
        "doctor.pair_command",
        "doctor.pair_meeting",
        "doctor.pair_probe",
        "doctor.pairs",
        "agent.arguments",
        "agent.board",
        "agent.duties",
        "agent.elastic_agent",
        "agent.internals",
        "agent.launcher",
        "agent.persisting",
        "agent.places",
        "agent.refusals",
        "agent.rendezvous",
        "agent.starting",
        "agent.stop_signals",
        "agent.workers",
        "amp",
        "arguments",
        "attempts",
        "averaging",
        "checkpoints",
        "ckpt.convert",
        "clipping",
        "data.choosing",
        "data.dealing",
        "data.order",
        "data.child",
        "data.crew",
        "data.forking",
        "data.internals",
        "data.nursery",
        "data.pool",
        "data.process",
        "data.ahead",
        "data.epochs",
        "data.following",
        "data.indexed",
        "data.loader",
        "data.making",
        "data.recut",
        "data.refusing",
        "data.sampler",
        "data.seeding",
        "data.spawner",
        "data.streamed",
        "data.tasks",
        "data.worker",
        "device_memory",
        "engine",
        "facts",
        "sharing_ways",
        "tampering",
        "loop_checks",
        "loss_graph",
        "guarding",
        "out_of_memory",
        "steps",
        "internals",
        "follow",
        "fsdp.checkpoint.checkpointer",
        "fsdp.checkpoint.collecting",
        "fsdp.checkpoint.comparing",
        "fsdp.checkpoint.differing",
        "fsdp.checkpoint.convert",
        "fsdp.checkpoint.dcpforeign",
        "fsdp.checkpoint.dcpincoming",
        "fsdp.checkpoint.dcpreader",
        "fsdp.checkpoint.dcpwriter",
        "fsdp.checkpoint.jobcheckpoints",
        "fsdp.checkpoint.livesaver",
        "fsdp.checkpoint.loader",
        "fsdp.checkpoint.memory",
        "fsdp.checkpoint.opened",
        "fsdp.checkpoint.restorer",
        "fsdp.checkpoint.run",
        "fsdp.checkpoint.savedvalues",
        "fsdp.checkpoint.copying",
        "fsdp.checkpoint.meeting",
        "fsdp.checkpoint.samples",
        "fsdp.checkpoint.saver",
        "fsdp.checkpoint.staging",
        "fsdp.checkpoint.storage",
        "fsdp.checkpoint.todcp",
        "fsdp.checkpoint.together",
        "fsdp.checkpoint.versions",
        "fsdp.blocks",
        "fsdp.cargo",
        "fsdp.carrier",
        "fsdp.companions",
        "fsdp.dtypes",
        "fsdp.fsdp2",
        "fsdp.holders",
        "fsdp.internals",
        "fsdp.live",
        "fsdp.names",
        "fsdp.optim_state",
        "fsdp.optim_groups",
        "fsdp.plain",
        "fsdp.random_state",
        "fsdp.recognise",
        "fsdp.refusals",
        "fsdp.replica",
        "fsdp.rewire",
        "fsdp.spread",
        "fsdp.state",
        "fsdp.trained",
        "fsdp.units",
        "finite_gradients",
        "gradient_pairs",
        "gradients",
        "learning",
        "optimizer",
        "optimizer_state",
        "outputs",
        "ranks",
        "rates",
        "master.strategy.columns",
        "master.strategy.model",
        "master.strategy.search",
        "master.strategy.switching",
        "model_report",
        "overlap",
        "own_positions",
        "parallelism",
        "preparing",
        "profile.analysis",
        "profile.analysis_process",
        "profile.analyzing",
        "profile.block_watch",
        "profile.calibrating",
        "profile.census",
        "profile.fake",
        "profile.held",
        "profile.likeness",
        "profile.live_bytes",
        "profile.memory_samples",
        "profile.model_sizes",
        "profile.probe",
        "profile.questioning",
        "profile.recorder",
        "profile.recording",
        "profile.surveying",
        "profile.tracing",
        "pulsing",
        "registered",
        "resuming",
        "run",
        "held_copies",
        "same_loading",
        "samplers",
        "saves",
        "saving",
        "session",
        "sharing",
        "snapshot",
        "speed",
        "taking_part",
        "trained_parameters",
        "trainer",
        "training_state",
        "weighing",
    }
)
HEAVY = frozenset({"torch", "numpy", "accelerate"})  # accelerate imports torch
USES_GRPC = frozenset(
    {
        "doctor.pair_command",
        "agent.config_watch",
        "cli",
        "master.commands",
        "master.tuning_command",
        "master.configs_of_master",
        "agent.launcher",
        "agent.master_choice",
        "agent.master_link",
        "agent.master_session",
        "agent.own_master",
        "run",
        "master.__main__",
        "master.client",
        "master.guard",
        "master.health",
        "master.process",
        "master.service",
        "master.wire.master_pb2_grpc",
    }
)
"""What speaks with a master, or is one: a training process never does."""
WHEN_CALLED: Mapping[str, str] = {
    "fsdp.checkpoint.casting": "numpy",
    "master.strategy.controller": "master.strategy.search",
    "profile.sinks": "torch",
}
"""What a light module imports in the functions that need it, which is not all that it is imported for: what is heavy,
or a module of ours that is."""

PUBLIC_NAMES = [
    "Applied",
    "Applier",
    "ApplyError",
    "BatchPlan",
    "Boundary",
    "CheckpointInterval",
    "ConfigError",
    "ConfigFollower",
    "ConfigWatcher",
    "ElasticConfig",
    "ElasticDataLoader",
    "ElasticDistributedSampler",
    "ElasticError",
    "ElasticLRScheduler",
    "ElasticOptimizer",
    "ElasticScaler",
    "ElasticTrainer",
    "MicroBatchSource",
    "ParallelPlan",
    "PeerLostError",
    "Proposal",
    "RanksDisagreeError",
    "RanksError",
    "RanksFailedError",
    "ReshardReport",
    "Sink",
    "StepError",
    "StepPlan",
    "StepProfile",
    "TensorBoardSink",
    "TornStepError",
    "WorkerDiedError",
    "follow_config",
]

READS_ENVIRON = frozenset(
    {
        "agent.at_start.sitecustomize",
        "cli",
        "master.__main__",
        "run",
        "follow",
        "fsdp.checkpoint.checkpointer",
        "profile.analysis_process",
        "profile.tracing",
        "settings",
        "trainer",
    }
)
WRITES_TO_THE_TERMINAL = frozenset(
    {"agent.warden", "cli", "master.__main__", "run"}
)  # what it prints is what it is for
BROAD_EXCEPT: Mapping[str, str] = {
    # "module:Class.function": the reason
    "agent.at_start.sitecustomize:_write_exceptions.write": "whatever cannot be written, the exception is printed",
    "agent.launcher:_Node._run": "torch's event log hears of it, and raises again",
    "agent.rendezvous:_make_handler": "the top of a thread: kept for the one who waits, who raises it",
    "agent.workers:Workers._start": "ends what it has started, and raises again",
    "agent.control:Control.start": "closes what it has opened, and raises again",
    "agent.control:Control._run": "the top of a thread: logged, and its owner sees that it has ended",
    "agent.control:Control._answer_to": "whatever answers: who asked is told, and the agent goes on",
    "agent.config_watch:ConfigWatch._run": "the top of a thread: logged; configs come with answers as well",
    "agent.master_link:MasterLink._try_once": "the top of a thread: logged, and tried again later",
    "appliers:Appliers._check": "an applier is the user's code: what it raises is told to all ranks",
    "appliers:Appliers._apply": "an applier is the user's code: what it raises is told to all ranks",
    "fsdp.blocks:_why_not_alike": "a block is the user's code: what it raises the second time is told as a refusal",
    "doctor.patience:answer_within.run": "the top of a thread: kept for the one who waits, who raises it",
    "data.ahead:Ahead.__next__": "what cannot be made is passed before it is raised again",
    "data.ahead:Ahead._taken": "whatever was raised instead of the batch, it is taken; raised again",
    "data.ahead:Ahead._batch_of": "another batch's failure is none of this one's, which is made again by itself",
    "data.making:Making.take": "whatever the user's code raised, the batch is asked for no more; raised again",
    "data.making:Making._made": "says of which samples it is what the user's code raised, and raises again",
    "data.copied:Copied.of": "pickling runs the user's code: what cannot be pickled is copied otherwise",
    "data.stream:Stream._go_to": "why a dataset cannot begin is raised in the place of each of its samples",
    "data.stream:Stream._draw": "kept in the place of the sample, and raised where that is wanted",
    "data.streams:Streams.__next__": "what cannot be made is passed before it is raised again",
    "data.pool:_loaded": "unpickling runs the user's code: kept for who takes the batch, who raises it",
    "data.process:Line._pickled": "pickling runs the user's code: what it raises is sent instead of the batch",
    "data.spawner:Spawner._run": "the top of a thread: kept for the pool, who raises it",
    "data.spawner:Spawner._start": "pickling runs the user's code: kept for the pool, who raises it",
    "data.tasks:reraise": "adds to what torch raises which sample it was, and raises again",
    "files:write_whole": "takes its temporary file away and raises again, whatever came",
    "follow:ConfigFollower.__enter__": "tells the peers that this rank leaves, closes, and raises again",
    "fsdp.checkpoint.background:BackgroundSave.start": "forgets a thread that did not start, and raises again",
    "fsdp.checkpoint.background:BackgroundSave._run": "the top of a thread: kept for who asks, and told to the others",
    "steps:Steps._do_first": "what was handed out for the step is given back, and raises again",
    "fsdp.checkpoint.livesaver:LiveSaver.save": "the others are to hear of it too, and raises again",
    "fsdp.checkpoint.livesaver:LiveSaver._wait_for": "has the save's thread wait no longer, and raises again",
    "fsdp.checkpoint.dcpreader:DcpFolder._loaded": "torch.load raises errors of pickle, which is not imported here",
    "fsdp.checkpoint.saver:Saver.save": "takes away what is left of a save that failed, and raises again",
    "fsdp.checkpoint.together:_add_what_it_gives": "whatever a rank raises, the others are to hear of it",
    "fsdp.checkpoint.storage:Storage.within.run": "the top of a thread: kept for the one who waits, who raises it",
    "master.asking:Asking._answer": "a master serves its agents whatever becomes of its tuner: logged, and told",
    "fsdp.live:Change.run": "whatever it is, what was there has to come back; raised on all ranks",
    "fsdp.live:Change._move": "there is not enough memory, as a rule; raised on all ranks",
    "fsdp.live:Change._agree_or_go_back": "puts back what was there, and raises again",
    "parallelism:Parallelism.apply": "says that training cannot go on with it, and raises again",
    "steps:Steps._share_at_end": "takes the step back, and raises again",
    "profile.analysis:analyse": "a factory is the user's code: what it raises is told to who has asked",
    "profile.analysis:_tell_passes": "a model and a loss are the user's code: told in the same way",
    "profile.analysis_process:main": "a script is imported, which is the user's code: told in the same way",
    "profile.sinks:Sinks.write": "a sink is the user's code: told once, and dropped",
    "profile.sinks:Sinks.close": "a sink is the user's code: the others are to be closed too",
    "session:Session.start": "tells the peers that this rank leaves, closes, and raises again",
    "watch:ConfigWatcher._told_of_change": "the top of what a thread of watchdog's calls; as in _run",
    "watch:ConfigWatcher._run": "the top of a thread: kept for the owner, who raises it",
}
PICKLES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"})


# --- reading the trees ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One import as it is written: of which module or name, on which line, and whether for a type checker alone."""

    target: str  # absolute and dotted; of `from a import b` it is a.b, which may be a module or a name in one
    line: int
    types_only: bool
    in_function: bool


def sources_of(folder: Path) -> dict[str, str]:
    """The text of every module under a package's folder, by dotted name below it (``__init__`` for its own)."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1]) if parts[-1] == "__init__" else ".".join(parts)
        found[name or FRONT] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a source text, which every check walks."""
    return ast.parse(source)


@functools.cache
def imports_of(module: str, source: str, *, is_package: bool = False) -> Sequence[Import]:
    """Every import of a module of the package: at its top, inside functions, and under TYPE_CHECKING."""
    folder = PACKAGE if module == FRONT else f"{PACKAGE}.{module}"
    if module != FRONT and not is_package:
        folder = folder.rpartition(".")[0]
    return tuple(_imports_in(parsed(source), folder, types_only=False, in_function=False))


def _imports_in(node: ast.AST, folder: str, *, types_only: bool, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child, folder):
            line = getattr(child, "lineno", 0)
            yield Import(target=target, line=line, types_only=types_only, in_function=in_function)
        if isinstance(child, ast.If) and _asks_type_checking(child.test):
            yield from _imports_in(
                ast.Module(body=child.body, type_ignores=[]), folder, types_only=True, in_function=in_function
            )
            rest = ast.Module(body=child.orelse, type_ignores=[])
            yield from _imports_in(rest, folder, types_only=types_only, in_function=in_function)
            continue
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports_in(child, folder, types_only=types_only, in_function=inside)


def _asks_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _targets(node: ast.AST, folder: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parts = folder.split(".")
        above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        base = ".".join(part for part in (above, node.module or "") if part)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = node.args[0].value
        if called in ("import_module", "__import__") and isinstance(name, str):
            return [folder + name if name.startswith(".") else name]
    return []


def inner(target: str, modules: Mapping[str, object]) -> str | None:
    """The module of the package that an import reaches (``__init__``: the package itself), None for one outside it."""
    if target != PACKAGE and not target.startswith(f"{PACKAGE}."):
        return None
    name = target.removeprefix(PACKAGE).removeprefix(".")
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or FRONT


# --- the rules ------------------------------------------------------------------------------------------------------


def _graph(sources: Mapping[str, str]) -> dict[str, Sequence[Import]]:
    packages = {name.rpartition(".")[0] for name in sources}
    return {name: imports_of(name, source, is_package=name in packages) for name, source in sources.items()}


def layer_faults(sources: Mapping[str, str], layers: Mapping[str, int]) -> list[str]:
    """Where imports go upward, go sideways where they must not, or go in a circle; and modules without a layer."""
    faults = [
        f"{PACKAGE}/{name.replace('.', '/')}.py has no layer: add {name!r} to LAYERS in tests/test_house.py, on the "
        "lowest layer that is above all it imports, and to the picture in docs/architecture.md"
        for name in sources
        if name != FRONT and name not in layers
    ]
    faults += [
        f"LAYERS has {name!r}, and {PACKAGE} has no such module: take the line out, here and in docs/architecture.md"
        for name in layers
        if name not in sources
    ]
    sideways: dict[str, set[str]] = {}
    for name, imports in _graph(sources).items():
        if name == FRONT or name not in layers:
            continue
        for seen in imports:
            fault = _direction_fault(name, seen, layers)
            if fault:
                faults.append(fault)
            reached = inner(seen.target, layers)
            if (
                reached
                and reached in layers
                and reached != name
                and layers[reached] == layers[name]
                and not seen.types_only
            ):
                sideways.setdefault(name, set()).add(reached)
    return faults + circles(sideways)


def _direction_fault(name: str, seen: Import, layers: Mapping[str, int]) -> str | None:
    """Why one import may not be, None where it may."""
    where = f"{PACKAGE}.{name}, line {seen.line}: {seen.target}"
    reached = inner(seen.target, layers)
    if reached is None:
        if layers[name] == 0 and seen.target.partition(".")[0] not in sys.stdlib_module_names:
            return f"{where} is not in the standard library, and layer 0 imports nothing else"
        return None
    if reached == FRONT:
        return f"{where} goes through the package itself; import the module that holds the name"
    mine, its = layers[name], layers[reached]
    if its > mine:
        return f"{where} is on layer {its}, above layer {mine}; imports go downward"
    if (
        its == mine
        and reached != name
        and mine not in SIDEWAYS
        and not seen.types_only
        and _room(name) != _room(reached)
    ):
        return f"{where} is on the same layer {mine}, where rooms do not import one another"
    return None


def _room(name: str) -> str:
    """The folder of the package that a module lies in; a module that lies in none is a room by itself."""
    return name.partition(".")[0]


def circles(edges: Mapping[str, set[str]]) -> list[str]:
    """One fault for each circle found in a graph, none where it has none."""
    faults: list[str] = []
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            faults.append("imports in a circle: " + " -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for reached in sorted(edges.get(name, ())):
                walk(reached, (*path, name))
            done.add(name)

    for start in sorted(edges):
        walk(start, ())
    return faults


def heavy_faults(
    sources: Mapping[str, str], uses: frozenset[str], heavy: frozenset[str] = HEAVY | {"grpc"}
) -> list[str]:
    """Where a module that must start without what is heavy reaches it, itself or through others, by which way."""
    graph = _graph(sources)

    def way_to_heavy(name: str, seen: set[str]) -> str | None:
        for found in graph.get(name, []):
            if found.types_only or (name == FRONT and found.in_function):
                continue
            step = f"{name}, line {found.line}"
            reached = inner(found.target, sources)
            root = found.target.partition(".")[0] if reached is None else ""
            if found.in_function and WHEN_CALLED.get(name, "nothing") in (reached, root):
                continue
            if reached is None:
                if root in heavy:
                    return f"{step}: {found.target}"
            elif reached not in seen:
                seen.add(reached)  # there is no way from it, or it is found now
                further = way_to_heavy(reached, seen)
                if further:
                    return f"{step} -> {further}"
        return None

    faults = []
    for name in sources:
        if name not in uses:
            way = way_to_heavy(name, {name})
            if way:
                faults.append(f"{PACKAGE}.{name} must do without {', '.join(sorted(heavy))}, and reaches one: {way}")
    return faults


def writing_faults(module: str, source: str) -> list[str]:
    """Where a module prints, sets up logging, reads the environment, catches everything, or pickles."""
    faults = list(_writing_faults_in(parsed(source), module, ""))
    for seen in imports_of(module, source):
        if seen.target.partition(".")[0] in PICKLES:
            faults.append(f"{module}, line {seen.line}: imports {seen.target}; nothing is pickled, on wire or disk")
        if seen.target in ("os.environ", "os.getenv", "os.environb") and module not in READS_ENVIRON:
            faults.append(f"{module}, line {seen.line}: imports {seen.target}; only entry points read the environment")
    return faults


def _place_in(place: str, node: ast.AST) -> str:
    """The dotted place of what stands inside a node, such as ``Class.function``."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return f"{place}.{node.name}".lstrip(".")
    return place


def _writing_faults_in(node: ast.AST, module: str, place: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = _place_in(place, child)
        fault = _writing_fault(child, module, inside)
        if fault:
            yield f"{module}, line {getattr(child, 'lineno', 0)}: {fault}"
        yield from _writing_faults_in(child, module, inside)


def _writing_fault(node: ast.AST, module: str, place: str) -> str | None:
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "print" and isinstance(node.func, ast.Name) and module not in WRITES_TO_THE_TERMINAL:
            return "prints; use the module's logger"
        if called == "basicConfig":
            return "sets up logging, which belongs to the program that uses the library"
        if called == "suppress" and any(_is_broad(one) for one in node.args):
            return "suppresses everything; name what is suppressed"
    if (
        isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "environb")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and module not in READS_ENVIRON
    ):
        return f"reads os.{node.attr}; take it as an argument, only entry points read the environment"
    if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and f"{module}:{place}" not in BROAD_EXCEPT:
        return f"catches everything; name what is caught, or add '{module}:{place}' with a reason to BROAD_EXCEPT"
    return None


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(one) for one in caught.elts)
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


def stale_broad_excepts(sources: Mapping[str, str], allowed: Mapping[str, str]) -> list[str]:
    """The places on the list of broad excepts that no longer have one."""
    seen: set[str] = set()

    def walk(node: ast.AST, module: str, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ExceptHandler) and _is_broad(child.type):
                seen.add(f"{module}:{place}")
            walk(child, module, _place_in(place, child))

    for module, source in sources.items():
        walk(parsed(source), module, "")
    return sorted(set(allowed) - seen)


# --- the library keeps them -----------------------------------------------------------------------------------------

SOURCES = sources_of(ROOT / PACKAGE)
LIGHT_MODULES = [PACKAGE, *(f"{PACKAGE}.{name}" for name in SOURCES if name != FRONT and name not in USES_TORCH)]

_IMPORT_EACH = """
import importlib, json, sys
names, heavy = json.loads(sys.argv[1])
loaded, faults = set(), []
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        faults.append(f"{name}: {type(error).__name__}: {error}")
    new = {one for one in heavy if one in sys.modules} - loaded
    if new:
        faults.append(f"importing {name} loads {', '.join(sorted(new))}")
    loaded |= new
print(json.dumps(faults))
"""


def import_faults(names: list[str], heavy: frozenset[str], root: Path) -> list[str]:
    """Which of some modules cannot be imported, or load what is heavy, in one fresh process that imports each."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_EACH, json.dumps([names, sorted(heavy)])],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    faults: list[str] = json.loads(done.stdout)
    return faults


def _no_faults(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


def test_imports_go_downward_and_every_module_has_a_layer() -> None:
    _no_faults(layer_faults(SOURCES, LAYERS))


def test_light_modules_reach_no_torch_in_the_syntax_trees() -> None:
    _no_faults(heavy_faults(SOURCES, USES_TORCH, HEAVY))


def test_what_speaks_no_grpc_reaches_none_in_the_syntax_trees() -> None:
    _no_faults(heavy_faults(SOURCES, USES_GRPC, frozenset({"grpc"})))


def test_light_modules_load_no_torch_in_a_fresh_process() -> None:
    _no_faults(import_faults(LIGHT_MODULES, HEAVY, ROOT))


def test_public_names_are_pinned() -> None:
    assert sorted(elastic_ext.__all__) == PUBLIC_NAMES
    assert set(PUBLIC_NAMES) <= set(dir(elastic_ext))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_resolves(name: str) -> None:
    assert getattr(elastic_ext, name) is getattr(elastic_ext, name)


def test_unknown_name_of_the_package_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = elastic_ext.no_such_name


@pytest.mark.parametrize("module", SOURCES)
def test_module_writes_nothing_the_house_forbids(module: str) -> None:
    _no_faults(writing_faults(module, SOURCES[module]))


def test_list_of_broad_excepts_is_not_stale() -> None:
    assert stale_broad_excepts(SOURCES, BROAD_EXCEPT) == []


# --- the checks can fail --------------------------------------------------------------------------------------------


def test_upward_import_is_a_fault_wherever_it_stands() -> None:
    layers = {"low": 1, "high": 4}
    for source in (
        "from elastic_ext.high import x",
        "from .high import x",
        "from . import high",
        "from elastic_ext import high",
        "import elastic_ext.high",
        "def f() -> None:\n    from .high import x",
        "if TYPE_CHECKING:\n    from .high import X",
        "import importlib\nimportlib.import_module('.high', 'elastic_ext')",
    ):
        (fault,) = layer_faults({"low": source, "high": ""}, layers)
        assert "elastic_ext.low" in fault, source
        assert "above layer 1" in fault, source


def test_downward_import_is_no_fault() -> None:
    assert (
        layer_faults({"high": "from .low import x\nfrom elastic_ext.low import y", "low": ""}, {"high": 4, "low": 1})
        == []
    )


def test_sideways_import_is_a_fault_on_upper_layers_alone_and_not_for_types() -> None:
    plain = {"a": "from .b import x", "b": ""}
    assert layer_faults(plain, {"a": 1, "b": 1}) == []
    assert "same layer 2" in layer_faults(plain, {"a": 2, "b": 2})[0]
    for_types = {"a": "import typing\nif typing.TYPE_CHECKING:\n    from .b import x", "b": ""}
    assert layer_faults(for_types, {"a": 2, "b": 2}) == []


def test_circle_is_a_fault_even_through_functions_but_not_through_types() -> None:
    layers = {"a": 1, "b": 1, "c": 1}
    lazy = {"a": "from .b import x", "b": "from .c import x", "c": "def f() -> None:\n    from .a import x"}
    assert layer_faults(lazy, layers) == ["imports in a circle: a -> b -> c -> a"]
    types = {**lazy, "c": "if TYPE_CHECKING:\n    from .a import X"}
    assert layer_faults(types, layers) == []


def test_imports_after_type_checking_else_are_real() -> None:
    source = "if TYPE_CHECKING:\n    from .a import X\nelse:\n    from .b import X"
    assert [(one.target, one.types_only) for one in imports_of("m", source)] == [
        ("elastic_ext.a.X", True),
        ("elastic_ext.b.X", False),
    ]


def test_module_without_a_layer_is_told_what_to_do() -> None:
    (fault,) = layer_faults({"fsdp.fresh": ""}, {})
    assert "elastic_ext/fsdp/fresh.py has no layer" in fault
    assert "LAYERS in tests/test_house.py" in fault


def test_layer_of_a_module_that_is_gone_is_a_fault() -> None:
    assert "no such module" in layer_faults({}, {"gone": 1})[0]


def test_layer_zero_imports_the_standard_library_alone() -> None:
    assert layer_faults({"low": "import json, os.path"}, {"low": 0}) == []
    assert "not in the standard library" in layer_faults({"low": "import watchdog.events"}, {"low": 0})[0]
    assert layer_faults({"one": "import watchdog.events"}, {"one": 1}) == []


def test_import_through_the_package_itself_is_a_fault() -> None:
    assert "through the package itself" in layer_faults({"a": "from elastic_ext import ElasticConfig"}, {"a": 1})[0]
    assert "through the package itself" in layer_faults({"a": "import elastic_ext"}, {"a": 1})[0]


def test_relative_imports_of_subpackages_are_read_rightly() -> None:
    source = "from . import moves\nfrom .layout import Box\nfrom ..ranks import Ranks"
    assert [one.target for one in imports_of("fsdp.live", source)] == [
        "elastic_ext.fsdp.moves",
        "elastic_ext.fsdp.layout.Box",
        "elastic_ext.ranks.group.Ranks",
    ]
    assert [one.target for one in imports_of("fsdp", "from .layout import Box", is_package=True)] == [
        "elastic_ext.fsdp.layout.Box"
    ]


def test_torch_behind_other_modules_is_found_with_the_way_to_it() -> None:
    sources = {"a": "def f() -> None:\n    from .b import x", "b": "import os\nimport torch.nn"}
    (fault,) = heavy_faults(sources, frozenset({"b"}))
    assert "elastic_ext.a must do without" in fault
    assert "a, line 2 -> b, line 2: torch.nn" in fault
    assert len(heavy_faults(sources, frozenset())) == 2
    assert heavy_faults({"a": "if TYPE_CHECKING:\n    import torch"}, frozenset()) == []


def test_what_a_light_module_may_import_when_called_is_found_anywhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.WHEN_CALLED", {"a": "numpy"})
    assert heavy_faults({"a": "def f() -> None:\n    import numpy"}, frozenset()) == []
    assert heavy_faults({"a": "import numpy"}, frozenset())
    assert heavy_faults({"a": "def f() -> None:\n    import torch"}, frozenset())
    assert heavy_faults({"b": "def f() -> None:\n    import numpy"}, frozenset())
    monkeypatch.setattr(f"{__name__}.WHEN_CALLED", {"a": "b"})
    heavy = {"b": "import numpy", "c": "import numpy"}
    assert heavy_faults({"a": "def f() -> None:\n    from .b import x", **heavy}, frozenset({"b", "c"})) == []
    assert heavy_faults({"a": "from .b import x", **heavy}, frozenset({"b", "c"}))
    assert heavy_faults({"a": "def f() -> None:\n    from .c import x", **heavy}, frozenset({"b", "c"}))


def test_torch_behind_the_package_file_is_found_unless_it_is_lazy() -> None:
    assert heavy_faults({FRONT: "from .b import x", "b": "import torch"}, frozenset({"b"}))
    assert heavy_faults({FRONT: "def f() -> None:\n    from .b import x", "b": "import torch"}, frozenset({"b"})) == []


def test_loading_a_heavy_module_or_failing_to_load_is_reported(tmp_path: Path) -> None:
    (tmp_path / "heavy_one.py").write_text("")
    (tmp_path / "light.py").write_text("")
    (tmp_path / "sly.py").write_text("import importlib\nimportlib.import_module('heavy' + '_one')")
    (tmp_path / "broken.py").write_text("1 / 0")
    faults = import_faults(["light", "sly", "broken"], frozenset({"heavy_one"}), tmp_path)
    assert faults == ["importing sly loads heavy_one", "broken: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('x')", "prints"),
        ("import logging\nlogging.basicConfig()", "sets up logging"),
        ("import os\nx = os.environ['A']", "reads os.environ"),
        ("import os\nx = os.getenv('A')", "reads os.getenv"),
        ("from os import environ", "imports os.environ"),
        ("try:\n    pass\nexcept:\n    pass", "catches everything"),
        ("try:\n    pass\nexcept Exception:\n    pass", "catches everything"),
        ("try:\n    pass\nexcept (OSError, BaseException) as error:\n    pass", "catches everything"),
        ("import contextlib\nwith contextlib.suppress(Exception):\n    pass", "suppresses everything"),
        ("def f() -> None:\n    import pickle", "nothing is pickled"),
        ("from marshal import loads", "nothing is pickled"),
    ],
)
def test_forbidden_writing_is_found(source: str, words: str) -> None:
    (fault,) = writing_faults("somewhere", source)
    assert words in fault


def test_what_resembles_forbidden_writing_is_no_fault() -> None:
    source = 'class A:\n    def print(self) -> None: ...\n\ndef f(a: A) -> None:\n    """print(x)"""\n    a.print()\n'
    assert writing_faults("somewhere", source) == []
    assert writing_faults("somewhere", "try:\n    pass\nexcept (OSError, ValueError):\n    pass") == []
    assert writing_faults("settings", "import os\nx = os.environ['A']") == []


def test_named_place_may_catch_everything_and_its_neighbour_may_not() -> None:
    body = "        try:\n            pass\n        except Exception:\n            pass\n"
    source = f"class ConfigWatcher:\n    def _run(self) -> None:\n{body}    def close(self) -> None:\n{body}"
    (fault,) = writing_faults("watch", source)
    assert "'watch:ConfigWatcher.close'" in fault


def test_stale_place_on_the_list_of_broad_excepts_is_found() -> None:
    assert stale_broad_excepts({"a": "def f() -> None: ..."}, {"a:f": "why"}) == ["a:f"]
