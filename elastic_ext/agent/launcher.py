"""One node's part of a job from start to end: where its files lie, how its agent is put together, and what exit status
it ends with.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import config_from_args

from elastic_ext.doctor.findings import check_node
from elastic_ext.doctor.hardware import look as look_at_machine
from elastic_ext.doctor.hardware import version_of
from elastic_ext.doctor.meeting import holds_store
from elastic_ext.doctor.records import NodeHardware
from elastic_ext.errors import in_words
from elastic_ext.fsdp.checkpoint.saving.rescue import rows_in
from elastic_ext.members.decision import MembersChoice
from elastic_ext.members.plan import LIVE, LOSSES
from elastic_ext.ranks.board import BoardGone
from elastic_ext.ranks.node_board import RoundBoard
from elastic_ext.ranks.processes import this_process
from elastic_ext.records.agent import AGENT_FILE, HARDWARE_FILE, AgentRecord
from elastic_ext.records.files import write_whole
from elastic_ext.records.run_dir import StartSettings
from elastic_ext.records.text import counted, expanded, on_one_line

from .arguments import (
    LaunchRefused,
    check_launch,
    check_options,
    seconds_in,
    settings_in_words,
    shutdown_seconds,
    with_rendezvous,
    without_outer,
)
from .config_writer import ConfigWriter, ForeignWrite, config_requests
from .control import Control
from .elastic_agent import ElasticAgent
from .folder import NODES, NodeFolders, NodeTaken, is_held, keep_newest, with_cache
from .journal import Failure, Journal, first_of, told
from .master.embedded import link_with, master_choice, tuning_mode
from .master.link import MasterLink
from .members import Drains, NotTaken, members_requests
from .node_tasks import NodeTasks
from .orphan_guard import Warden
from .rendezvous import NodeRendezvous, handler_for, on_loopback, persist
from .status.files import read_run_directory
from .status.status import status_of
from .workers.hangs import HangLimits
from .workers.monitor import Monitor, NvidiaGpus
from .workers.stragglers import SlowWorkers
from .workers.workers import Launch, StopSignals, WorkerNotStarted

__all__ = ["folders_of", "is_in_worker", "launch", "settings_of"]

_logger = logging.getLogger(__name__)


# --- where a node's part of a job has its things: which job it is, and the run directory that is its own -------------

_NO_RUN = ("", "none")


def settings_of(options: argparse.Namespace, environ: Mapping[str, str]) -> StartSettings:
    """The job's start settings (its name, run directory, config file) by a command line and its environment.

    ValueError for invalid settings.
    """
    given_run_id = None if options.standalone or options.rdzv_id in _NO_RUN else options.rdzv_id
    return StartSettings.resolve(
        with_cache(environ),
        script=_script_of(options),
        job=options.job or environ.get("ELASTIC_EXT_JOB") or given_run_id,
        config_file=options.config_file,
    )


def folders_of(settings: StartSettings, host: str, *, is_given: bool) -> NodeFolders:
    """The folders of this node's agent, locked by it; ``is_given`` says that the user has named the run directory.

    LaunchRefused where another agent has that directory, or none can be made.
    """
    try:
        return NodeFolders.make(settings.run_dir if is_given else settings.run_dir / NODES / host, is_given=is_given)
    except NodeTaken as error:
        raise LaunchRefused(str(error)) from None
    except OSError as error:
        raise LaunchRefused(
            f"the run directory cannot be made: {in_words(error)}; give another one: ELASTIC_EXT_RUN_DIR"
        ) from error


def is_in_worker(environ: Mapping[str, str]) -> bool:
    """Whether this launcher was started by a worker of another agent: ``environ`` names that agent's run directory."""
    run_dir = environ.get("ELASTIC_EXT_RUN_DIR")
    try:
        return "ELASTIC_EXT_STAGING_DIR" in environ and bool(run_dir) and is_held(expanded(run_dir or ""))
    except (OSError, ValueError):  # which is refused where it is used
        return False


def _script_of(options: argparse.Namespace) -> str:
    """The path of the training script, or of the module that is run, as the command line names it."""
    name: str = options.training_script
    return f"{name.replace('.', '/')}.py" if options.module else name


# --- one node of a job, from its start to its end: what elastic-run does ---------------------------------------------

_KEPT_LOGS = 10
_SOCKET = "socket"
_LAST_EXCHANGE_SECONDS = 20.0
_PART_SECONDS = 5.0
_BEATS, _BEAT_SECONDS = 3, 5  # torch's own, where nobody asks for others
_OF_SIGNALS = 128  # the exit status after a signal is that and the signal's number
_FIRST_WORD_SECONDS = 3.0  # for a master that keeps this node out to say so


def launch(
    options: argparse.Namespace, environ: Mapping[str, str], *, as_given: Callable[[], AbstractContextManager[None]]
) -> int:
    """Run this node's part of a job, and give the exit status; LaunchRefused for a job that cannot be started as asked.

    ``environ`` is the environment that the user gave. The context of ``as_given`` is entered while workers are started:
    within it the process has that environment.
    """
    host = socket.gethostname()
    if is_in_worker(environ):
        environ = without_outer(environ)
    try:
        check_options(options, environ)
        settings = settings_of(options, environ)
        this_process()
    except ValueError as error:
        raise LaunchRefused(str(error)) from None
    except OSError as error:
        raise LaunchRefused(f"processes cannot be identified without /proc: {in_words(error)}") from None
    with StopSignals(options.signals_to_handle) as signals:
        folders = folders_of(settings, host, is_given=bool(environ.get("ELASTIC_EXT_RUN_DIR")))
        try:
            return _made(options, environ, settings, folders, signals, host, as_given).run()
        finally:
            folders.close()


def _made(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    settings: StartSettings,
    folders: NodeFolders,
    signals: StopSignals,
    host: str,
    as_given: Callable[[], AbstractContextManager[None]],
) -> _Launch:
    """The launch, put together; LaunchRefused for options that torch refuses, or a log folder that cannot be made."""
    try:
        return _Launch(options, environ, settings, folders, signals, host=host, as_given=as_given)
    except (ValueError, AssertionError, RuntimeError) as error:  # torch asserts what was given
        raise LaunchRefused(str(error)) from error
    except OSError as error:
        raise LaunchRefused(
            f"the folder for logs cannot be made: {in_words(error)}; --log-dir names another"
        ) from error


class _Launch:
    """One launch of a node's workers, with the objects that it owns."""

    def __init__(
        self,
        options: argparse.Namespace,
        environ: Mapping[str, str],
        settings: StartSettings,
        folders: NodeFolders,
        signals: StopSignals,
        *,
        host: str,
        as_given: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._started_at = time.time()
        self._as_given = as_given
        self._environ = environ
        self._settings = settings
        self._folders = folders
        self._signals = signals
        self._host = host
        self._config_file = (
            settings.config_file
            if options.config_file or "ELASTIC_EXT_CONFIG_FILE" in environ
            else (folders.run_dir / "config.json")
        )
        self._said = settings_in_words(options, environ)
        if options.log_dir is None:
            options.log_dir = str(folders.run_dir / "logs")
            keep_newest(folders.run_dir / "logs", _KEPT_LOGS - 1)
        self._is_checked = bool(options.node_check)
        self._master = master_choice(options)
        self._tuning = tuning_mode(options, self._master)
        self._members: MembersChoice = options.members
        self._hang_limits = HangLimits.of(options.hang_seconds)
        options = with_rendezvous(options)
        self._launch, self._entrypoint, self._arguments = config_from_args(options)
        self._shutdown_seconds = shutdown_seconds(options, environ)
        check_launch(self._launch, environ)
        self._is_python = isinstance(self._entrypoint, str) and not options.no_python
        self._node_id = f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
        self._journal = Journal(folders.run_dir)
        self._config_writer = ConfigWriter(self._config_file, on_foreign=self._note_foreign)

    def run(self) -> int:
        """Check the machine, connect to the master, run the workers to their end; the exit status."""
        self._introduce()
        if (why_not := self._check_machine()) is not None:
            self._journal.tell("refused", why_not, is_bad=True)
            return 2
        link = self._link()
        if link is not None and (why_not := link.refusal_within(_FIRST_WORD_SECONDS)) is not None:
            self._journal.tell("refused", why_not, is_bad=True)
            link.close("the master refuses it")
            return 2
        status = 1
        try:
            status = self._start(link)
        finally:
            if link is not None:
                link.close(_why_it_leaves(status))
        return status

    def _start(self, link: MasterLink | None) -> int:
        """Run the agent and its workers to their end, and complete what they had staged; the exit status."""
        folders = self._folders
        warden = Warden(folders.memory, folders.memory_lock, patience_seconds=self._shutdown_seconds)
        tasks = self._tasks(link)
        agent: ElasticAgent | None = None
        status = 1
        try:
            self._signals.let_through()
            launch, loopback = on_loopback(self._launch)
            meeting = NodeRendezvous(
                handler_for(launch),
                is_pending=lambda: agent is not None and agent.calls_meeting,
                loopback=loopback,
                local_addr=launch.local_addr,
            )
            tasks.start()
            if launch.max_nodes > 1 and meeting.is_dynamic and holds_store(launch.rdzv_endpoint):
                words = f"this node has the rendezvous, {launch.rdzv_endpoint}: once it is gone no other node can join"
                self._journal.tell("rendezvous", f"{words} or come back; the workers of those that are in go on")
            agent = self._agent(meeting, warden, tasks)
            status = self._run(agent, meeting)
        except RendezvousError as error:
            self._journal.tell("rendezvous-failed", f"the nodes could not meet: {error}", is_bad=True)
        except SignalException as error:
            self._signals.hold()
            has_worked = agent is not None and agent.workers is not None
            what = "has ended its workers" if has_worked else "ends before it has started workers,"
            left = "" if agent is None else tasks.words_of_leaving(each.seat for each in agent.watched)
            is_drained = agent is not None and agent.is_drained
            why = "it was told to leave" if is_drained else error.sigval.name
            self._journal.tell("ended", f"this node {what} after {why}{f'; {left}' if left else ''}")
            status = 0 if is_drained else _OF_SIGNALS + int(error.sigval)
        except NotTaken as error:
            self._journal.tell("not-taken", f"this node has not joined the others: {error}", is_bad=True)
        except WorkerNotStarted as error:
            self._journal.tell("failed", f"workers could not be started: {error}", is_bad=True)
        finally:
            self._signals.hold()
            if agent is not None and agent.workers is not None:
                self._persist(meeting.board if agent.is_over else None)
            tasks.end(() if agent is None else agent.watched)
            warden.dismiss()
        return status

    def _persist(self, board: RoundBoard | None) -> None:
        """Make a checkpoint of what was staged as the job ended; with the other nodes where ``board`` is given."""
        try:
            for outcome in persist(self._folders.staging, board, name="end", timeout_seconds=_LAST_EXCHANGE_SECONDS):
                self._journal.tell_staged(outcome.why, outcome.path)
        except BoardGone as error:
            if rows_in(self._folders.staging):
                words = f"the checkpoint staged on this node is lost, as other nodes do not answer: {error}"
                self._journal.tell("staged", words)
        if board is not None:
            board.part(timeout_seconds=_PART_SECONDS)

    def _check_machine(self) -> str | None:
        """Why workers are not to be started on this machine; None if nothing is wrong, or no node check was asked for.

        The machine's hardware is written into the run directory either way.
        """
        look = partial(look_at_machine, [self._config_file.parent], run_dir=self._folders.run_dir)
        if not self._is_checked:
            threading.Thread(  # nobody waits for it: a file system that does not answer would hold up the agent's end
                target=lambda: self._write_hardware(look()), daemon=True, name="elastic_ext hardware"
            ).start()
            return None
        hardware = look()
        self._write_hardware(hardware)
        why_not, warnings = check_node(hardware, num_nodes=self._launch.max_nodes)
        for warning in warnings:
            self._journal.tell("machine", warning)
        return why_not

    def _write_hardware(self, hardware: NodeHardware) -> None:
        try:
            write_whole(self._folders.run_dir / HARDWARE_FILE, hardware.to_json().encode(), durable=False)
        except OSError as error:
            _logger.debug("the hardware record of this machine cannot be written: %s", error)

    def _run(self, agent: ElasticAgent, meeting: NodeRendezvous) -> int:
        """Run the agent's loop, with the events that torch's launcher records; the exit status."""
        handler = self._launch.event_log_handler
        is_over = True
        try:
            initialize_metrics(MetricsConfig(self._launch.metrics_cfg))
            result: RunResult | None = agent.run()
            events.record(agent.get_event_succeeded(), handler)
            if result is None:  # torch says so of a node that others did not wait for
                self._journal.tell("left-out", "the other nodes have met without this one, which the job does not need")
                return 0
            if not result.is_failed():
                self._journal.tell("succeeded", "all workers of this node have ended well")
                return 0
            self._tell_failed(agent.final_failures)
            return 1
        except (SignalException, NotTaken):
            self._signals.hold()
            is_over = False  # others may go on without this node
            events.record(agent.get_event_failed(), handler)
            if meeting.board is None:
                meeting.leave()
            raise
        except BaseException:
            events.record(agent.get_event_failed(), handler)
            raise
        finally:
            if is_over:
                meeting.shutdown()

    def _tell_failed(self, failures: list[Failure]) -> None:
        if not failures:
            self._journal.tell("failed", "the job failed on another node, and has ended on this one", is_bad=True)
            return
        cause = first_of(failures)
        others = [f"rank {each.rank} on {each.host} {each.ending}" for each in failures if each is not cause]
        words = f"the job has failed, and no restart is left: {told(cause)}"
        if others:
            words += f"\n  and then: {'; '.join(others)}"
        self._journal.tell("failed", words, is_bad=True)

    def _link(self) -> MasterLink | None:
        """The link with the master, started: its thread looks for the master from now on; None without a master."""
        library = version_of("elastic-ext") or "not installed"
        link = link_with(
            self._master,
            self._folders.run_dir,
            self._config_writer,
            self._journal,
            job=self._settings.job,
            agent_id=self._node_id,
            host=self._host,
            library=library,
            started_at=self._started_at,
            tuning=self._tuning,
        )
        if link is not None:
            link.start()
        return link

    def _tasks(self, link: MasterLink | None) -> NodeTasks:
        folders, run_dir = self._folders, self._folders.run_dir
        writer = self._config_writer

        def status(request: Mapping[str, Any]) -> Mapping[str, Any]:
            return status_of(read_run_directory(run_dir, now=time.time(), host=self._host)).to_dict()

        monitor = Monitor(run_dir=run_dir, pulse_dir=folders.pulses, limits=self._hang_limits, gpus=NvidiaGpus.open())
        drains = Drains()
        requests = {
            **config_requests(writer),
            **members_requests(run_dir, drains, min_nodes=self._launch.min_nodes),
            "status": status,
        }
        control = Control(folders.memory / _SOCKET, requests)
        slow = SlowWorkers(run_dir, host=self._host)
        on_begun = (lambda: None) if link is None else link.begin_configs
        return NodeTasks(folders, self._journal, writer, control, monitor, slow, drains=drains, on_begun=on_begun)

    def _note_foreign(self, write: ForeignWrite) -> None:
        self._journal.note("config-foreign", write.words, version=write.version, digest=write.digest, valid=write.valid)

    @property
    def _may_go_on_without_some(self) -> bool:
        """Whether workers may go on where others are lost; else they need not be ready for it."""
        launch = self._launch
        return self._members != "restart" and launch.min_nodes < launch.max_nodes and launch.max_restarts > 0

    def _agent(self, meeting: NodeRendezvous, warden: Warden, tasks: NodeTasks) -> ElasticAgent:
        launch, folders = self._launch, self._folders
        spec = WorkerSpec(
            role=launch.role,
            local_world_size=launch.nproc_per_node,
            entrypoint=self._entrypoint,
            args=tuple(self._arguments),
            rdzv_handler=meeting,
            max_restarts=launch.max_restarts,
            monitor_interval=launch.monitor_interval,
            local_addr=launch.local_addr,
            event_log_handler=launch.event_log_handler,
            numa_options=launch.numa_options,
            duplicate_stdout_filters=launch.duplicate_stdout_filters,
            duplicate_stderr_filters=launch.duplicate_stderr_filters,
            virtual_local_rank=launch.virtual_local_rank,
        )
        beats = seconds_in(launch, "keep_alive_max_attempt", _BEATS)
        beat_seconds = seconds_in(launch, "keep_alive_interval", _BEAT_SECONDS)
        how = Launch(
            node_id=self._node_id,
            host=self._host,
            environment={
                "ELASTIC_EXT_JOB": self._settings.job,
                "ELASTIC_EXT_RUN_DIR": str(folders.run_dir),
                "ELASTIC_EXT_CONFIG_FILE": str(self._config_file),
                "ELASTIC_EXT_STAGING_DIR": str(folders.staging),
                "ELASTIC_EXT_PULSE_DIR": str(folders.pulses),
                "ELASTIC_EXT_SHUTDOWN_SECONDS": str(max(self._shutdown_seconds, 1.0)),
                **({LOSSES: LIVE} if self._may_go_on_without_some else {}),
            },
            inherited=self._environ,
            as_given=self._as_given,
            is_python=self._is_python,
            start_method=launch.start_method,
            log_line_prefix_template=launch.log_line_prefix_template,
            shutdown_seconds=self._shutdown_seconds,
            silence_seconds=beats * beat_seconds + 1.0,
            min_nodes=launch.min_nodes,
            max_nodes=launch.max_nodes,
            members=self._members,
        )
        assert launch.logs_specs is not None
        return ElasticAgent(spec, launch.logs_specs, meeting, how, folders, warden, self._journal, tasks, self._signals)

    def _introduce(self) -> None:
        """Write this agent's record into the run directory, and log what is started and where its files are."""
        launch, folders = self._launch, self._folders
        process = this_process()
        assert launch.logs_specs is not None
        record = AgentRecord(
            node_id=self._node_id,
            job=self._settings.job,
            run_id=launch.run_id,
            host=self._host,
            pid=process.pid,
            start_ticks=process.start_ticks,
            time=self._started_at,
            version=version_of("elastic-ext") or "not installed",
            config_file=str(self._config_file),
            memory_folder=str(folders.memory),
            socket=str(folders.memory / _SOCKET),
            log_folder=launch.logs_specs.root_log_dir,
        )
        try:
            write_whole(folders.run_dir / AGENT_FILE, f"{record.to_json()}\n".encode(), durable=False)
        except OSError as error:  # training needs none of these files
            words = (
                f"{folders.run_dir} cannot be written: {in_words(error)}; elastic-ext status and config see no agent"
            )
            self._journal.tell("trouble", words, is_bad=True)
        least, most = launch.min_nodes, launch.max_nodes
        nodes = counted(most, "node") if least == most else f"{least} to {most} nodes"
        workers = counted(launch.nproc_per_node, "worker")
        self._journal.tell(
            "started", f"job {on_one_line(record.job)}: {workers} on this node, {nodes}; node {record.node_id}"
        )
        for name, value in (
            ("settings", ", ".join(self._said) or "all as by default"),
            ("config", f"{record.config_file}    (elastic-ext config set KEY=VALUE --file ...)"),
            ("metrics", f"{folders.run_dir}    (elastic-ext status {folders.run_dir})"),
            ("logs", record.log_folder),
            ("checkpoints", "logged once training has begun"),
        ):
            _logger.info("  %-12s %s", name, on_one_line(value))


def _why_it_leaves(status: int) -> str:
    """The reason that a master is given as the node leaves, by the launcher's exit status."""
    if status == 0:
        return "its workers have ended well"
    return "it was told to end" if status > _OF_SIGNALS else f"it ends with status {status}"
