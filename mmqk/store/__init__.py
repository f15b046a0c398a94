"""The run folder, both ways: identity, lock, status, metrics, tags, alarms. Standard library only."""

from mmqk.store.alarms import (
    Alarm,
    AlarmConfig,
    AlarmRules,
    DivergenceRule,
    alarms_of,
    append_alarms,
    read_alarms,
    truncate_alarms,
)
from mmqk.store.errors import OneSentenceParser, UserError, front_door, run_main, with_dashes
from mmqk.store.files import (
    DamagedFile,
    open_regular,
    parse_json,
    read_json,
    read_regular,
    write_atomic,
    write_json,
)
from mmqk.store.folder import EXIT_CODES, FINISHED, RunFolder, Status, mark_ended, read_run, read_status
from mmqk.store.identity import (
    canonical,
    code_hash,
    differing_fields,
    flatten,
    hash_fraction,
    identity_hash,
)
from mmqk.store.lock import FolderLock, is_locked
from mmqk.store.metrics import MetricLines, MetricsWriter, from_json, last_metrics, read_metrics
from mmqk.store.tags import Tag, parse_tag, parsed_tag, tag
from mmqk.store.words import clock, dashboards, relative, relative_word, without_roots

__all__ = [
    "EXIT_CODES",
    "FINISHED",
    "Alarm",
    "AlarmConfig",
    "AlarmRules",
    "DamagedFile",
    "DivergenceRule",
    "FolderLock",
    "MetricLines",
    "MetricsWriter",
    "OneSentenceParser",
    "RunFolder",
    "Status",
    "Tag",
    "UserError",
    "alarms_of",
    "append_alarms",
    "canonical",
    "clock",
    "code_hash",
    "dashboards",
    "differing_fields",
    "flatten",
    "from_json",
    "front_door",
    "hash_fraction",
    "identity_hash",
    "is_locked",
    "last_metrics",
    "mark_ended",
    "open_regular",
    "parse_json",
    "parse_tag",
    "parsed_tag",
    "read_alarms",
    "read_json",
    "read_metrics",
    "read_regular",
    "read_run",
    "read_status",
    "relative",
    "relative_word",
    "run_main",
    "tag",
    "truncate_alarms",
    "with_dashes",
    "without_roots",
    "write_atomic",
    "write_json",
]
