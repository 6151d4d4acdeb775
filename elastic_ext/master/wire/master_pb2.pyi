from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "oldest_protocol", "job", "job_id", "epoch", "node", "hardware")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    oldest_protocol: int
    job: str
    job_id: str
    epoch: int
    node: Node
    hardware: str
    def __init__(self, protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ..., job: _Optional[str] = ..., job_id: _Optional[str] = ..., epoch: _Optional[int] = ..., node: _Optional[_Union[Node, _Mapping]] = ..., hardware: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "incarnation", "host", "pid", "library", "started_at", "agent_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    host: str
    pid: int
    library: str
    started_at: float
    agent_id: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., library: _Optional[str] = ..., started_at: _Optional[float] = ..., agent_id: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("protocol", "job_id", "job", "epoch", "lease_seconds", "beat_seconds", "acknowledge_seconds", "library", "was_lost")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    WAS_LOST_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job_id: str
    job: str
    epoch: int
    lease_seconds: float
    beat_seconds: float
    acknowledge_seconds: float
    library: str
    was_lost: bool
    def __init__(self, protocol: _Optional[int] = ..., job_id: _Optional[str] = ..., job: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., beat_seconds: _Optional[float] = ..., acknowledge_seconds: _Optional[float] = ..., library: _Optional[str] = ..., was_lost: bool = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "epoch", "held", "membership", "workers", "events", "num_events_dropped", "hardware", "trouble", "first_event", "facts")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_EVENT_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    epoch: int
    held: ConfigHeld
    membership: Membership
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    events: _containers.RepeatedCompositeFieldContainer[JobEvent]
    num_events_dropped: int
    hardware: str
    trouble: str
    first_event: int
    facts: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., held: _Optional[_Union[ConfigHeld, _Mapping]] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[JobEvent, _Mapping]]] = ..., num_events_dropped: _Optional[int] = ..., hardware: _Optional[str] = ..., trouble: _Optional[str] = ..., first_event: _Optional[int] = ..., facts: _Optional[str] = ...) -> None: ...

class ConfigHeld(_message.Message):
    __slots__ = ("version", "digest", "text")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    text: str
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("version", "nodes", "reason", "time")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    version: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeShare]
    reason: str
    time: float
    def __init__(self, version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeShare, _Mapping]]] = ..., reason: _Optional[str] = ..., time: _Optional[float] = ...) -> None: ...

class NodeShare(_message.Message):
    __slots__ = ("node_id", "host", "first_rank", "num_workers")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host: str
    first_rank: int
    num_workers: int
    def __init__(self, node_id: _Optional[str] = ..., host: _Optional[str] = ..., first_rank: _Optional[int] = ..., num_workers: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("rank", "local_rank", "pid", "state", "exit_code", "step", "steps_per_second", "samples_per_second", "tokens_per_second", "memory_bytes", "accelerator_bytes", "cpu_percent", "gpu_percent", "config_version", "config_revision", "activity", "activity_seconds", "trouble", "shares", "step_seconds", "slow_step_seconds", "windows", "metrics")
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    GPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_REVISION_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLOW_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    local_rank: int
    pid: int
    state: str
    exit_code: int
    step: int
    steps_per_second: float
    samples_per_second: float
    tokens_per_second: float
    memory_bytes: int
    accelerator_bytes: int
    cpu_percent: float
    gpu_percent: float
    config_version: int
    config_revision: int
    activity: str
    activity_seconds: float
    trouble: str
    shares: _containers.ScalarMap[str, float]
    step_seconds: float
    slow_step_seconds: float
    windows: _containers.RepeatedCompositeFieldContainer[StepWindow]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., exit_code: _Optional[int] = ..., step: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., samples_per_second: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., accelerator_bytes: _Optional[int] = ..., cpu_percent: _Optional[float] = ..., gpu_percent: _Optional[float] = ..., config_version: _Optional[int] = ..., config_revision: _Optional[int] = ..., activity: _Optional[str] = ..., activity_seconds: _Optional[float] = ..., trouble: _Optional[str] = ..., shares: _Optional[_Mapping[str, float]] = ..., step_seconds: _Optional[float] = ..., slow_step_seconds: _Optional[float] = ..., windows: _Optional[_Iterable[_Union[StepWindow, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StepWindow(_message.Message):
    __slots__ = ("begin", "end", "rank", "world_size", "restart", "step", "num_steps", "config_version", "config_revision", "seconds", "processor_seconds", "typical", "step_seconds", "num_samples", "num_tokens", "num_bytes", "num_detailed", "memory_bytes", "accelerator_bytes", "accelerator_peak_bytes", "waiting_seconds", "computing_seconds", "is_settling", "members")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ProcessorSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TypicalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_REVISION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_DETAILED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IS_SETTLING_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    begin: float
    end: float
    rank: int
    world_size: int
    restart: int
    step: int
    num_steps: int
    config_version: int
    config_revision: int
    seconds: _containers.ScalarMap[str, float]
    processor_seconds: _containers.ScalarMap[str, float]
    typical: _containers.ScalarMap[str, float]
    step_seconds: _containers.RepeatedScalarFieldContainer[float]
    num_samples: int
    num_tokens: int
    num_bytes: int
    num_detailed: int
    memory_bytes: int
    accelerator_bytes: int
    accelerator_peak_bytes: int
    waiting_seconds: float
    computing_seconds: float
    is_settling: bool
    members: int
    def __init__(self, begin: _Optional[float] = ..., end: _Optional[float] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., restart: _Optional[int] = ..., step: _Optional[int] = ..., num_steps: _Optional[int] = ..., config_version: _Optional[int] = ..., config_revision: _Optional[int] = ..., seconds: _Optional[_Mapping[str, float]] = ..., processor_seconds: _Optional[_Mapping[str, float]] = ..., typical: _Optional[_Mapping[str, float]] = ..., step_seconds: _Optional[_Iterable[float]] = ..., num_samples: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_detailed: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., accelerator_bytes: _Optional[int] = ..., accelerator_peak_bytes: _Optional[int] = ..., waiting_seconds: _Optional[float] = ..., computing_seconds: _Optional[float] = ..., is_settling: bool = ..., members: _Optional[int] = ...) -> None: ...

class BeatReply(_message.Message):
    __slots__ = ("epoch", "lease_seconds", "beat_seconds", "config_version", "config", "wants_config", "wants_hardware", "job_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    WANTS_CONFIG_FIELD_NUMBER: _ClassVar[int]
    WANTS_HARDWARE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_seconds: float
    beat_seconds: float
    config_version: int
    config: str
    wants_config: bool
    wants_hardware: bool
    job_id: str
    def __init__(self, epoch: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., beat_seconds: _Optional[float] = ..., config_version: _Optional[int] = ..., config: _Optional[str] = ..., wants_config: bool = ..., wants_hardware: bool = ..., job_id: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "epoch", "config_version")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VERSION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    epoch: int
    config_version: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., config_version: _Optional[int] = ...) -> None: ...

class ConfigPush(_message.Message):
    __slots__ = ("epoch", "version", "text", "acknowledge_within_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_WITHIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    text: str
    acknowledge_within_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., text: _Optional[str] = ..., acknowledge_within_seconds: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "reason", "events")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    reason: str
    events: _containers.RepeatedCompositeFieldContainer[JobEvent]
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., events: _Optional[_Iterable[_Union[JobEvent, _Mapping]]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("without_workers", "num_events")
    WITHOUT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_FIELD_NUMBER: _ClassVar[int]
    without_workers: bool
    num_events: int
    def __init__(self, without_workers: bool = ..., num_events: _Optional[int] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("time", "job", "job_id", "epoch", "up_seconds", "library", "nodes", "membership", "config", "progress", "verdict", "troubles", "recommendations", "groups", "events", "tuning")
    TIME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    RECOMMENDATIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TUNING_FIELD_NUMBER: _ClassVar[int]
    time: float
    job: str
    job_id: str
    epoch: int
    up_seconds: float
    library: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    membership: Membership
    config: ConfigStatus
    progress: Progress
    verdict: Verdict
    troubles: _containers.RepeatedScalarFieldContainer[str]
    recommendations: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedCompositeFieldContainer[NodeGroup]
    events: _containers.RepeatedCompositeFieldContainer[JobEvent]
    tuning: TuningStatus
    def __init__(self, time: _Optional[float] = ..., job: _Optional[str] = ..., job_id: _Optional[str] = ..., epoch: _Optional[int] = ..., up_seconds: _Optional[float] = ..., library: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ..., config: _Optional[_Union[ConfigStatus, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., troubles: _Optional[_Iterable[str]] = ..., recommendations: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[_Union[NodeGroup, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[JobEvent, _Mapping]]] = ..., tuning: _Optional[_Union[TuningStatus, _Mapping]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "state", "seen_seconds", "config_version", "workers", "machine", "troubles")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    node: Node
    state: str
    seen_seconds: float
    config_version: int
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    machine: str
    troubles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., state: _Optional[str] = ..., seen_seconds: _Optional[float] = ..., config_version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., machine: _Optional[str] = ..., troubles: _Optional[_Iterable[str]] = ...) -> None: ...

class ConfigStatus(_message.Message):
    __slots__ = ("version", "text", "reason", "author", "time", "num_holding", "num_nodes", "in_force")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDING_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    text: str
    reason: str
    author: str
    time: float
    num_holding: int
    num_nodes: int
    in_force: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., text: _Optional[str] = ..., reason: _Optional[str] = ..., author: _Optional[str] = ..., time: _Optional[float] = ..., num_holding: _Optional[int] = ..., num_nodes: _Optional[int] = ..., in_force: _Optional[_Iterable[int]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "steps_per_second", "samples_per_second", "tokens_per_second", "shares", "metrics")
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps_per_second: float
    samples_per_second: float
    tokens_per_second: float
    shares: _containers.ScalarMap[str, float]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., samples_per_second: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., shares: _Optional[_Mapping[str, float]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("kind", "text", "share")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    share: float
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., share: _Optional[float] = ...) -> None: ...

class NodeGroup(_message.Message):
    __slots__ = ("node_ids", "latency_seconds", "bandwidth")
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    latency_seconds: float
    bandwidth: float
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ..., latency_seconds: _Optional[float] = ..., bandwidth: _Optional[float] = ...) -> None: ...

class ReadEventsRequest(_message.Message):
    __slots__ = ("after", "follow", "most")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    after: int
    follow: bool
    most: int
    def __init__(self, after: _Optional[int] = ..., follow: bool = ..., most: _Optional[int] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("number", "time", "node_id", "rank", "step", "kind", "text", "details", "restart")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    node_id: str
    rank: int
    step: int
    kind: str
    text: str
    details: str
    restart: int
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., node_id: _Optional[str] = ..., rank: _Optional[int] = ..., step: _Optional[int] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., details: _Optional[str] = ..., restart: _Optional[int] = ...) -> None: ...

class SetConfigRequest(_message.Message):
    __slots__ = ("changes", "remove", "reason", "at_step", "job")
    class ChangesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_STEP_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.ScalarMap[str, str]
    remove: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    at_step: int
    job: str
    def __init__(self, changes: _Optional[_Mapping[str, str]] = ..., remove: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., at_step: _Optional[int] = ..., job: _Optional[str] = ...) -> None: ...

class UndoConfigRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ConfigWritten(_message.Message):
    __slots__ = ("version", "text", "before")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    version: int
    text: str
    before: str
    def __init__(self, version: _Optional[int] = ..., text: _Optional[str] = ..., before: _Optional[str] = ...) -> None: ...

class GetConfigsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConfigHistory(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[ConfigEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[ConfigEntry, _Mapping]]] = ...) -> None: ...

class ConfigEntry(_message.Message):
    __slots__ = ("version", "text", "time", "author", "node_id", "restores")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    version: int
    text: str
    time: float
    author: str
    node_id: str
    restores: int
    def __init__(self, version: _Optional[int] = ..., text: _Optional[str] = ..., time: _Optional[float] = ..., author: _Optional[str] = ..., node_id: _Optional[str] = ..., restores: _Optional[int] = ...) -> None: ...

class ReportPairsRequest(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: str
    def __init__(self, report: _Optional[str] = ...) -> None: ...

class ReportPairsReply(_message.Message):
    __slots__ = ("recommendations",)
    RECOMMENDATIONS_FIELD_NUMBER: _ClassVar[int]
    recommendations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, recommendations: _Optional[_Iterable[str]] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ("since",)
    SINCE_FIELD_NUMBER: _ClassVar[int]
    since: float
    def __init__(self, since: _Optional[float] = ...) -> None: ...

class MetricHistory(_message.Message):
    __slots__ = ("points",)
    POINTS_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[MetricPoint]
    def __init__(self, points: _Optional[_Iterable[_Union[MetricPoint, _Mapping]]] = ...) -> None: ...

class MetricPoint(_message.Message):
    __slots__ = ("time", "seconds", "step", "steps_per_second", "samples_per_second", "num_nodes", "num_workers", "config_version", "shares", "tokens_per_second", "step_seconds")
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TIME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    time: float
    seconds: float
    step: int
    steps_per_second: float
    samples_per_second: float
    num_nodes: int
    num_workers: int
    config_version: int
    shares: _containers.ScalarMap[str, float]
    tokens_per_second: float
    step_seconds: float
    def __init__(self, time: _Optional[float] = ..., seconds: _Optional[float] = ..., step: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., samples_per_second: _Optional[float] = ..., num_nodes: _Optional[int] = ..., num_workers: _Optional[int] = ..., config_version: _Optional[int] = ..., shares: _Optional[_Mapping[str, float]] = ..., tokens_per_second: _Optional[float] = ..., step_seconds: _Optional[float] = ...) -> None: ...

class TuningStatus(_message.Message):
    __slots__ = ("mode", "standing", "text", "best", "predicted", "measured", "num_decisions")
    MODE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    NUM_DECISIONS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    standing: str
    text: str
    best: float
    predicted: float
    measured: float
    num_decisions: int
    def __init__(self, mode: _Optional[str] = ..., standing: _Optional[str] = ..., text: _Optional[str] = ..., best: _Optional[float] = ..., predicted: _Optional[float] = ..., measured: _Optional[float] = ..., num_decisions: _Optional[int] = ...) -> None: ...

class GetTuningRequest(_message.Message):
    __slots__ = ("most",)
    MOST_FIELD_NUMBER: _ClassVar[int]
    most: int
    def __init__(self, most: _Optional[int] = ...) -> None: ...

class ControlTuningRequest(_message.Message):
    __slots__ = ("action", "reason", "job")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    action: str
    reason: str
    job: str
    def __init__(self, action: _Optional[str] = ..., reason: _Optional[str] = ..., job: _Optional[str] = ...) -> None: ...

class TuningReport(_message.Message):
    __slots__ = ("status", "decisions")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    status: TuningStatus
    decisions: _containers.RepeatedCompositeFieldContainer[TuningDecision]
    def __init__(self, status: _Optional[_Union[TuningStatus, _Mapping]] = ..., decisions: _Optional[_Iterable[_Union[TuningDecision, _Mapping]]] = ...) -> None: ...

class TuningDecision(_message.Message):
    __slots__ = ("number", "time", "kind", "reason", "base", "changes", "version", "before", "predicted", "measured", "predicted_bytes", "outcome")
    class ChangesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    number: int
    time: float
    kind: str
    reason: str
    base: int
    changes: _containers.ScalarMap[str, str]
    version: int
    before: float
    predicted: float
    measured: float
    predicted_bytes: int
    outcome: str
    def __init__(self, number: _Optional[int] = ..., time: _Optional[float] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ..., base: _Optional[int] = ..., changes: _Optional[_Mapping[str, str]] = ..., version: _Optional[int] = ..., before: _Optional[float] = ..., predicted: _Optional[float] = ..., measured: _Optional[float] = ..., predicted_bytes: _Optional[int] = ..., outcome: _Optional[str] = ...) -> None: ...
