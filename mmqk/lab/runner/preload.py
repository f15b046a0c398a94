"""Import the modules that `mmqk.train` imports inside its functions. The fork server does this once, so that runs
start fast.

These modules start no thread and initialize no GPU, because threads and initialized GPUs do not work in a forked
process.
"""

# ruff: noqa: F401
import lightning.pytorch.utilities.exceptions
import tensorboard.compat.proto.summary_pb2
import tensorboard.plugins.hparams.api_pb2
import tensorboard.summary.writer.event_file_writer

import mmqk.checkpoint
import mmqk.config
import mmqk.data.datamodule
import mmqk.monitors.own.callback
import mmqk.train
import mmqk.training.alarms
import mmqk.training.fork
import mmqk.training.loggers
import mmqk.training.loop
import mmqk.training.module
import mmqk.training.ranks
import mmqk.training.tensorboard
from mmqk.store import code_version

# Read the commit now: runs execute the code imported here, even if the files change later.
code_version()
