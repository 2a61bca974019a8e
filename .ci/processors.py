"""Run a pytest command with every kind of arithmetic that this machine supports, with 1 and 2
threads."""

import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from clap_ds.cpu_kernels import jit_build

OWN, AVX2 = {"CXX": "false"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # no compiler, no native kernels
KINDS = {  # environment variables, and the ATen capabilities that the kind disables
    "native kernels": ({}, ""),
    "torch's": (OWN, ""),
    "oneDNN without AMX": (
        OWN | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        "AVX512",
    ),  # as on AMD since Zen 4
    "oneDNN without bf16": (OWN | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "AVX512"),
    "oneDNN AVX2": (OWN | AVX2, "AVX512"),
    "ATen AVX2": (OWN | {"ATEN_CPU_CAPABILITY": "avx2"}, "AVX512"),
    "oneDNN and ATen AVX2": (OWN | AVX2 | {"ATEN_CPU_CAPABILITY": "avx2"}, "AVX512"),
    "ATen without vectors": (OWN | {"ATEN_CPU_CAPABILITY": "default"}, "AVX512 AVX2"),
}
has = torch.backends.cpu.get_cpu_capability()
for kind, (variables, capabilities) in list(KINDS.items()):
    why_not = f"the processor has {has}" if capabilities and has not in capabilities else ""
    if problem := why_not or (not variables and jit_build.unavailable()):
        print(f"{kind:22} unavailable: {problem}", flush=True)
        del KINDS[kind]
codes = []
for threads, (kind, (variables, _)) in itertools.product("12", KINDS.items()):
    environment, start = {**os.environ, **variables, "OMP_NUM_THREADS": threads}, time.monotonic()
    done = subprocess.run(
        sys.argv[1:], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout[-500:])
    }
    numbers = "".join(
        f"{counts.get(word, 0):6} {word}" for word in ("passed", "failed", "error", "skipped")
    )
    print(f"{kind:22} {threads} threads {numbers} {time.monotonic() - start:6.0f} s", flush=True)
    print(
        "".join(re.findall(r"^(?:FAILED|ERROR) .*\n", done.stdout, re.MULTILINE)),
        end="",
        flush=True,
    )
    codes.append(done.returncode)
sys.exit(any(codes))
