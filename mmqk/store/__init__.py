"""Read and write run folders: identity, lock, status, metrics, tags, alarms. Imports neither torch nor numpy.

folder            a run folder: identity of the run, lock, run.json, status.json
metrics           names of series, metrics.jsonl
rules             rules over one series: spikes, stall, growth, collapse
alarms            divergence and rise, all rules over all series, alarms.jsonl
checkpoint_files  names and digests of checkpoint files
pack              many runs in one file
files             atomic writes, checked reads, the files that ship with mmqk
errors            user errors and exit codes
formatting        numbers, tables and paths as text
"""

# ruff: noqa: F401
from mmqk.store.alarms import AlarmRules, DivergenceRule, alarms_of, append_alarms, read_alarms, truncate_alarms
from mmqk.store.errors import OneSentenceParser, UserError, cli_main, disk_sentence, run_main
from mmqk.store.files import (
    GRIDS,
    DamagedFile,
    check_empty,
    check_local,
    check_regular,
    find_file,
    named_config,
    naming,
    new_folder,
    read_json,
    read_regular,
    read_utf8,
    replacing,
    with_configs,
    write_atomic,
    write_folder,
    write_json,
)
from mmqk.store.folder import (
    EXIT_CODES,
    NoRun,
    RunFolder,
    Status,
    canonical,
    code_version,
    differing_fields,
    find_runs,
    flatten,
    hash_fraction,
    identity_hash,
    is_locked,
    mark_ended,
    read_details,
    read_run,
    read_status,
)
from mmqk.store.formatting import clock, dashboards, relative, relative_word, without_roots
from mmqk.store.metrics import MetricsWriter, Tag, last_metrics, parse_tag, read_metrics, tag
from mmqk.store.rules import Alarm
