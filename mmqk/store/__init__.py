"""Read and write run folders: identity, lock, status, metrics, tags, alarms. Imports neither torch nor numpy."""

# ruff: noqa: F401
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
from mmqk.store.code import code_version
from mmqk.store.errors import OneSentenceParser, UserError, cli_main, disk_sentence, run_main
from mmqk.store.files import (
    DamagedFile,
    check_local,
    check_regular,
    naming,
    new_folder,
    open_regular,
    read_json,
    read_regular,
    read_utf8,
    replacing,
    write_atomic,
    write_folder,
    write_json,
)
from mmqk.store.folder import (
    EXIT_CODES,
    FINISHED,
    NoRun,
    RunFolder,
    Status,
    find_runs,
    mark_ended,
    read_run,
    read_status,
)
from mmqk.store.formatting import clock, dashboards, relative, relative_word, without_roots
from mmqk.store.identity import (
    canonical,
    differing_fields,
    flatten,
    hash_fraction,
    identity_hash,
)
from mmqk.store.lock import is_locked
from mmqk.store.metrics import MetricsWriter, last_metrics, read_metrics
from mmqk.store.shipped import GRIDS, find_file, named_config, with_configs
from mmqk.store.tags import Tag, parse_tag, parsed_tag, tag
