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

# no compiler, so no native kernels
TORCH = {"CXX": "false"}
# kind of arithmetic → environment variables, and the ATen capabilities that it disables
KINDS: dict[str, tuple[dict[str, str], str]] = {
    "native kernels": ({}, ""),
    "torch's": (TORCH, ""),
    # as on AMD since Zen 4
    "oneDNN without AMX": (TORCH | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "AVX512"),
    "oneDNN without bf16": (TORCH | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "AVX512"),
    "oneDNN AVX2": (TORCH | {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX512"),
    "ATen AVX2": (TORCH | {"ATEN_CPU_CAPABILITY": "avx2"}, "AVX512"),
    "oneDNN and ATen AVX2": (
        TORCH | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        "AVX512",
    ),
    "ATen without vectors": (TORCH | {"ATEN_CPU_CAPABILITY": "default"}, "AVX512 AVX2"),
}
RESULTS = ("passed", "failed", "error", "skipped")


def explain_unavailable(kind: str) -> str:
    """Return why this machine lacks a kind of arithmetic; empty if it has it."""
    variables, capabilities = KINDS[kind]
    capability = torch.backends.cpu.get_cpu_capability()
    if capabilities and capability not in capabilities:
        return f"the processor has {capability}"
    return "" if variables else jit_build.unavailable()


def run(command: list[str], kind: str, num_threads: int) -> int:
    """Run pytest, print a line and its failures, and return its exit code."""
    variables, _ = KINDS[kind]
    environment = os.environ | variables | {"OMP_NUM_THREADS": str(num_threads)}
    start = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - start
    # pytest's last line: 1 failed, 20 passed in 3.0 s
    counts = dict.fromkeys(RESULTS, 0)
    for number, result in re.findall(rf"(\d+) ({'|'.join(RESULTS)})", done.stdout[-500:]):
        counts[result] = int(number)
    numbers = "".join(f"{count:6} {result}" for result, count in counts.items())
    print(f"{kind:22} {num_threads} threads {numbers} {seconds:6.0f} s", flush=True)
    for failure in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE):
        print(failure, flush=True)
    return done.returncode


def main() -> None:
    available = []
    for kind in KINDS:
        if problem := explain_unavailable(kind):
            print(f"{kind:22} unavailable: {problem}", flush=True)
        else:
            available.append(kind)
    threads_and_kinds = itertools.product((1, 2), available)
    codes = [run(sys.argv[1:], kind, threads) for threads, kind in threads_and_kinds]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
