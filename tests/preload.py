"""What the commands under test import, once for all processes forked from it (`tests/processes.py`).

Imports alone: nothing here may start a thread, which a fork would lose.
"""

import gc

import deepspeed
import matplotlib.pyplot  # noqa: F401
import pytest  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

import clap_ds.analysis.plot_run
import clap_ds.benchmark.flops_profile
import clap_ds.benchmark.throughput
import clap_ds.engine.session
import clap_ds.evaluation.evaluator
import clap_ds.inference.model
import clap_ds.training.trainer  # noqa: F401

dict(deepspeed.ops.__compatible_ops__)  # asks a compiler
gc.collect()
gc.freeze()  # collections look at what a process makes itself
