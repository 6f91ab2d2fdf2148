from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHAT_UNSPECIFIED: _ClassVar[What]
    NODE: _ClassVar[What]
    INPUT: _ClassVar[What]
    OUTPUT: _ClassVar[What]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    API: _ClassVar[Kind]
    MODULE: _ClassVar[Kind]
    PARAMETERS_GRAD: _ClassVar[Kind]
    SCOPE: _ClassVar[Kind]
    SAVE: _ClassVar[Kind]

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTION_NONE: _ClassVar[Direction]
    FORWARD: _ClassVar[Direction]
    BACKWARD: _ClassVar[Direction]

class TensorFlag(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_FLAG_NONE: _ClassVar[TensorFlag]
    HAS_RANGE: _ClassVar[TensorFlag]
    HAS_SUMS: _ClassVar[TensorFlag]
    HAS_COUNTS: _ClassVar[TensorFlag]
    HAS_CHECKSUM: _ClassVar[TensorFlag]
    IS_CAPTURED: _ClassVar[TensorFlag]

class Form(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORM_UNSPECIFIED: _ClassVar[Form]
    TENSOR: _ClassVar[Form]
    SCALAR: _ClassVar[Form]
    VERBATIM: _ClassVar[Form]
    NULL: _ClassVar[Form]
    EMPTY: _ClassVar[Form]
WHAT_UNSPECIFIED: What
NODE: What
INPUT: What
OUTPUT: What
KIND_UNSPECIFIED: Kind
API: Kind
MODULE: Kind
PARAMETERS_GRAD: Kind
SCOPE: Kind
SAVE: Kind
DIRECTION_NONE: Direction
FORWARD: Direction
BACKWARD: Direction
TENSOR_FLAG_NONE: TensorFlag
HAS_RANGE: TensorFlag
HAS_SUMS: TensorFlag
HAS_COUNTS: TensorFlag
HAS_CHECKSUM: TensorFlag
IS_CAPTURED: TensorFlag
FORM_UNSPECIFIED: Form
TENSOR: Form
SCALAR: Form
VERBATIM: Form
NULL: Form
EMPTY: Form

class FromAgent(_message.Message):
    __slots__ = ("hello", "batch", "heartbeat", "tensor_chunk")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_CHUNK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    batch: SequencedBatch
    heartbeat: Heartbeat
    tensor_chunk: TensorChunk
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., batch: _Optional[_Union[SequencedBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., tensor_chunk: _Optional[_Union[TensorChunk, _Mapping]] = ...) -> None: ...

class FromCollector(_message.Message):
    __slots__ = ("welcome", "ack", "want", "command", "problem", "farewell", "notice", "status")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    ack: Ack
    want: Want
    command: Command
    problem: Problem
    farewell: Farewell
    notice: Notice
    status: Status
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., command: _Optional[_Union[Command, _Mapping]] = ..., problem: _Optional[_Union[Problem, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "agent_version", "process_uuid", "run", "run_key", "host", "boot_id", "pid", "process_started", "attempt", "parent_process_uuid", "parent_pid", "rank", "device", "recording", "versions", "dump_path", "spool_path", "token", "pid_namespace", "delivered_later", "probe", "status")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_UUID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_KEY_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_STARTED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PARENT_PROCESS_UUID_FIELD_NUMBER: _ClassVar[int]
    PARENT_PID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DUMP_PATH_FIELD_NUMBER: _ClassVar[int]
    SPOOL_PATH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_LATER_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    agent_version: str
    process_uuid: str
    run: str
    run_key: str
    host: str
    boot_id: str
    pid: int
    process_started: float
    attempt: int
    parent_process_uuid: str
    parent_pid: int
    rank: Rank
    device: str
    recording: Recording
    versions: _containers.ScalarMap[str, str]
    dump_path: str
    spool_path: str
    token: str
    pid_namespace: int
    delivered_later: bool
    probe: bool
    status: bool
    def __init__(self, protocol_version: _Optional[int] = ..., agent_version: _Optional[str] = ..., process_uuid: _Optional[str] = ..., run: _Optional[str] = ..., run_key: _Optional[str] = ..., host: _Optional[str] = ..., boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., process_started: _Optional[float] = ..., attempt: _Optional[int] = ..., parent_process_uuid: _Optional[str] = ..., parent_pid: _Optional[int] = ..., rank: _Optional[_Union[Rank, _Mapping]] = ..., device: _Optional[str] = ..., recording: _Optional[_Union[Recording, _Mapping]] = ..., versions: _Optional[_Mapping[str, str]] = ..., dump_path: _Optional[str] = ..., spool_path: _Optional[str] = ..., token: _Optional[str] = ..., pid_namespace: _Optional[int] = ..., delivered_later: bool = ..., probe: bool = ..., status: bool = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("rank", "world_size", "local_rank", "source", "coordinates", "group", "replica")
    class CoordinatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    COORDINATES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    local_rank: int
    source: str
    coordinates: _containers.ScalarMap[str, int]
    group: str
    replica: int
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., local_rank: _Optional[int] = ..., source: _Optional[str] = ..., coordinates: _Optional[_Mapping[str, int]] = ..., group: _Optional[str] = ..., replica: _Optional[int] = ...) -> None: ...

class Recording(_message.Message):
    __slots__ = ("task", "level", "summary_mode", "precision", "extra_info", "config_json")
    TASK_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_MODE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    EXTRA_INFO_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    task: str
    level: str
    summary_mode: str
    precision: str
    extra_info: bool
    config_json: str
    def __init__(self, task: _Optional[str] = ..., level: _Optional[str] = ..., summary_mode: _Optional[str] = ..., precision: _Optional[str] = ..., extra_info: bool = ..., config_json: _Optional[str] = ...) -> None: ...

class SequencedBatch(_message.Message):
    __slots__ = ("sequence", "payload", "crc32", "newest_sequence")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    NEWEST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    payload: bytes
    crc32: int
    newest_sequence: int
    def __init__(self, sequence: _Optional[int] = ..., payload: _Optional[bytes] = ..., crc32: _Optional[int] = ..., newest_sequence: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("time",)
    TIME_FIELD_NUMBER: _ClassVar[int]
    time: float
    def __init__(self, time: _Optional[float] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("columns", "steps", "rank", "drops", "goodbye", "stacks", "recording", "blobs")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    columns: Columns
    steps: _containers.RepeatedCompositeFieldContainer[StepEvent]
    rank: Rank
    drops: _containers.RepeatedCompositeFieldContainer[DropCount]
    goodbye: Goodbye
    stacks: _containers.RepeatedCompositeFieldContainer[Stack]
    recording: Recording
    blobs: _containers.RepeatedCompositeFieldContainer[Blob]
    def __init__(self, columns: _Optional[_Union[Columns, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepEvent, _Mapping]]] = ..., rank: _Optional[_Union[Rank, _Mapping]] = ..., drops: _Optional[_Iterable[_Union[DropCount, _Mapping]]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., stacks: _Optional[_Iterable[_Union[Stack, _Mapping]]] = ..., recording: _Optional[_Union[Recording, _Mapping]] = ..., blobs: _Optional[_Iterable[_Union[Blob, _Mapping]]] = ...) -> None: ...

class Columns(_message.Message):
    __slots__ = ("first_event", "event_count", "names", "outlines", "values", "event_step", "event_name", "event_what", "event_kind", "event_direction", "event_outline", "event_parent", "event_stack", "event_time", "leaf_value", "flags", "max", "min", "sum", "sum_of_squares", "nan_count", "inf_count", "zero_count", "checksum", "digest", "digests", "std", "sample_count", "samples", "objects", "event_object", "event_object_call")
    FIRST_EVENT_FIELD_NUMBER: _ClassVar[int]
    EVENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    OUTLINES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    EVENT_STEP_FIELD_NUMBER: _ClassVar[int]
    EVENT_NAME_FIELD_NUMBER: _ClassVar[int]
    EVENT_WHAT_FIELD_NUMBER: _ClassVar[int]
    EVENT_KIND_FIELD_NUMBER: _ClassVar[int]
    EVENT_DIRECTION_FIELD_NUMBER: _ClassVar[int]
    EVENT_OUTLINE_FIELD_NUMBER: _ClassVar[int]
    EVENT_PARENT_FIELD_NUMBER: _ClassVar[int]
    EVENT_STACK_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    LEAF_VALUE_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    SUM_OF_SQUARES_FIELD_NUMBER: _ClassVar[int]
    NAN_COUNT_FIELD_NUMBER: _ClassVar[int]
    INF_COUNT_FIELD_NUMBER: _ClassVar[int]
    ZERO_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EVENT_OBJECT_FIELD_NUMBER: _ClassVar[int]
    EVENT_OBJECT_CALL_FIELD_NUMBER: _ClassVar[int]
    first_event: int
    event_count: int
    names: _containers.RepeatedScalarFieldContainer[str]
    outlines: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[str]
    event_step: bytes
    event_name: bytes
    event_what: bytes
    event_kind: bytes
    event_direction: bytes
    event_outline: bytes
    event_parent: bytes
    event_stack: bytes
    event_time: bytes
    leaf_value: bytes
    flags: bytes
    max: bytes
    min: bytes
    sum: bytes
    sum_of_squares: bytes
    nan_count: bytes
    inf_count: bytes
    zero_count: bytes
    checksum: bytes
    digest: bytes
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    std: bytes
    sample_count: bytes
    samples: bytes
    objects: _containers.RepeatedScalarFieldContainer[str]
    event_object: bytes
    event_object_call: bytes
    def __init__(self, first_event: _Optional[int] = ..., event_count: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., outlines: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[str]] = ..., event_step: _Optional[bytes] = ..., event_name: _Optional[bytes] = ..., event_what: _Optional[bytes] = ..., event_kind: _Optional[bytes] = ..., event_direction: _Optional[bytes] = ..., event_outline: _Optional[bytes] = ..., event_parent: _Optional[bytes] = ..., event_stack: _Optional[bytes] = ..., event_time: _Optional[bytes] = ..., leaf_value: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., max: _Optional[bytes] = ..., min: _Optional[bytes] = ..., sum: _Optional[bytes] = ..., sum_of_squares: _Optional[bytes] = ..., nan_count: _Optional[bytes] = ..., inf_count: _Optional[bytes] = ..., zero_count: _Optional[bytes] = ..., checksum: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., digests: _Optional[_Iterable[bytes]] = ..., std: _Optional[bytes] = ..., sample_count: _Optional[bytes] = ..., samples: _Optional[bytes] = ..., objects: _Optional[_Iterable[str]] = ..., event_object: _Optional[bytes] = ..., event_object_call: _Optional[bytes] = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("digest", "dtype", "shape", "size", "file", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    size: int
    file: str
    offset: int
    def __init__(self, digest: _Optional[bytes] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., size: _Optional[int] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class Outline(_message.Message):
    __slots__ = ("structure", "leaves")
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    structure: str
    leaves: _containers.RepeatedCompositeFieldContainer[LeafTemplate]
    def __init__(self, structure: _Optional[str] = ..., leaves: _Optional[_Iterable[_Union[LeafTemplate, _Mapping]]] = ...) -> None: ...

class LeafTemplate(_message.Message):
    __slots__ = ("part", "path", "form", "type", "dtype", "shape", "requires_grad", "extra_json")
    PART_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    part: str
    path: str
    form: Form
    type: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    requires_grad: bool
    extra_json: str
    def __init__(self, part: _Optional[str] = ..., path: _Optional[str] = ..., form: _Optional[_Union[Form, str]] = ..., type: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., requires_grad: bool = ..., extra_json: _Optional[str] = ...) -> None: ...

class Stack(_message.Message):
    __slots__ = ("id", "frames")
    ID_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    id: int
    frames: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[int] = ..., frames: _Optional[_Iterable[str]] = ...) -> None: ...

class StepEvent(_message.Message):
    __slots__ = ("step", "kind", "events", "time", "reason", "agent_seconds", "wall_seconds", "shed")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[StepEvent.Kind]
        BEGIN: _ClassVar[StepEvent.Kind]
        PAUSE: _ClassVar[StepEvent.Kind]
        END: _ClassVar[StepEvent.Kind]
        SKIPPED: _ClassVar[StepEvent.Kind]
    KIND_UNSPECIFIED: StepEvent.Kind
    BEGIN: StepEvent.Kind
    PAUSE: StepEvent.Kind
    END: StepEvent.Kind
    SKIPPED: StepEvent.Kind
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHED_FIELD_NUMBER: _ClassVar[int]
    step: int
    kind: StepEvent.Kind
    events: int
    time: float
    reason: str
    agent_seconds: float
    wall_seconds: float
    shed: str
    def __init__(self, step: _Optional[int] = ..., kind: _Optional[_Union[StepEvent.Kind, str]] = ..., events: _Optional[int] = ..., time: _Optional[float] = ..., reason: _Optional[str] = ..., agent_seconds: _Optional[float] = ..., wall_seconds: _Optional[float] = ..., shed: _Optional[str] = ...) -> None: ...

class DropCount(_message.Message):
    __slots__ = ("step", "events", "reason", "first_sequence", "last_sequence")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    step: int
    events: int
    reason: str
    first_sequence: int
    last_sequence: int
    def __init__(self, step: _Optional[int] = ..., events: _Optional[int] = ..., reason: _Optional[str] = ..., first_sequence: _Optional[int] = ..., last_sequence: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("digest", "offset", "total", "data", "missing")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    total: int
    data: bytes
    missing: bool
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ..., total: _Optional[int] = ..., data: _Optional[bytes] = ..., missing: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "collector_version", "collector_id", "durable_sequence", "run", "run_path", "max_message_bytes", "time")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_ID_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RUN_PATH_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    collector_version: str
    collector_id: str
    durable_sequence: int
    run: str
    run_path: str
    max_message_bytes: int
    time: float
    def __init__(self, protocol_version: _Optional[int] = ..., collector_version: _Optional[str] = ..., collector_id: _Optional[str] = ..., durable_sequence: _Optional[int] = ..., run: _Optional[str] = ..., run_path: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., time: _Optional[float] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("durable_sequence", "refuses_tensors")
    DURABLE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REFUSES_TENSORS_FIELD_NUMBER: _ClassVar[int]
    durable_sequence: int
    refuses_tensors: bool
    def __init__(self, durable_sequence: _Optional[int] = ..., refuses_tensors: bool = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("version", "effective_step", "config_json")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_STEP_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    version: int
    effective_step: int
    config_json: str
    def __init__(self, version: _Optional[int] = ..., effective_step: _Optional[int] = ..., config_json: _Optional[str] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("code", "message", "retry_after_seconds", "closes_stream", "refused_sequence")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Problem.Code]
        INVALID: _ClassVar[Problem.Code]
        NO_SPACE: _ClassVar[Problem.Code]
        OVERLOADED: _ClassVar[Problem.Code]
        SEQUENCE_GAP: _ClassVar[Problem.Code]
        REFUSED: _ClassVar[Problem.Code]
        INTERNAL: _ClassVar[Problem.Code]
    CODE_UNSPECIFIED: Problem.Code
    INVALID: Problem.Code
    NO_SPACE: Problem.Code
    OVERLOADED: Problem.Code
    SEQUENCE_GAP: Problem.Code
    REFUSED: Problem.Code
    INTERNAL: Problem.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_STREAM_FIELD_NUMBER: _ClassVar[int]
    REFUSED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    code: Problem.Code
    message: str
    retry_after_seconds: float
    closes_stream: bool
    refused_sequence: int
    def __init__(self, code: _Optional[_Union[Problem.Code, str]] = ..., message: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ..., closes_stream: bool = ..., refused_sequence: _Optional[int] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("run_path", "folders")
    RUN_PATH_FIELD_NUMBER: _ClassVar[int]
    FOLDERS_FIELD_NUMBER: _ClassVar[int]
    run_path: str
    folders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_path: _Optional[str] = ..., folders: _Optional[_Iterable[str]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("level", "text")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    level: str
    text: str
    def __init__(self, level: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("streams", "held_bytes", "runs")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    streams: int
    held_bytes: int
    runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    def __init__(self, streams: _Optional[int] = ..., held_bytes: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run", "events", "bytes", "disk_bytes", "queued", "problem", "processes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    run: str
    events: int
    bytes: int
    disk_bytes: int
    queued: int
    problem: str
    processes: _containers.RepeatedCompositeFieldContainer[ProcessStatus]
    def __init__(self, run: _Optional[str] = ..., events: _Optional[int] = ..., bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., queued: _Optional[int] = ..., problem: _Optional[str] = ..., processes: _Optional[_Iterable[_Union[ProcessStatus, _Mapping]]] = ...) -> None: ...

class ProcessStatus(_message.Message):
    __slots__ = ("process_uuid", "host", "pid", "folder", "state", "step", "durable_sequence", "behind", "silent_seconds", "dropped_events", "refused_batches")
    PROCESS_UUID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    process_uuid: str
    host: str
    pid: int
    folder: str
    state: str
    step: int
    durable_sequence: int
    behind: int
    silent_seconds: float
    dropped_events: int
    refused_batches: int
    def __init__(self, process_uuid: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., folder: _Optional[str] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., durable_sequence: _Optional[int] = ..., behind: _Optional[int] = ..., silent_seconds: _Optional[float] = ..., dropped_events: _Optional[int] = ..., refused_batches: _Optional[int] = ...) -> None: ...
