"""Import what commands under test need, once for all processes forked from here
(`tests/processes.py`).

Only imports: forks would lose threads started here.
"""

import gc

import deepspeed
import matplotlib.pyplot  # noqa: F401
import pytest  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

import clap_ds.analysis.plot_run
import clap_ds.evaluation.evaluator
import clap_ds.inference.model
import clap_ds.run
import clap_ds.throughput_bench.flops_profile
import clap_ds.throughput_bench.report
import clap_ds.training.loop  # noqa: F401

dict(deepspeed.ops.__compatible_ops__)  # calls a compiler
gc.collect()
gc.freeze()  # processes only scan their own objects
