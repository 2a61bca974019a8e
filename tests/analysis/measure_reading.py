"""How fast logs are read: writes a log of the given size, reads it plain and compressed, prints seconds and peak memory.

    python tests/analysis/measure_reading.py [--gigabytes 1] [--every 1]

`--every 1` prints throughput and breakdown at each step, the slowest kind to read; more fills the log with other lines.
"""

import argparse
import gzip
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clap_ds.analysis.deepspeed_log import scan_log
from tests.analysis.logs import throughput_line

BREAKDOWN = "[Rank 0] time (ms) | fwd: 0.45 | bwd: 2.25 | bwd_inner: 0.78 | bwd_allreduce: 1.46 | step: 2.45\n"
OTHER = "[2026-11-20 19:09:33,233] [INFO] worker 7: shard train-000123.tar, time (ms) 12, global_step unknown\n"


def write_log(path: Path, num_bytes: float, every: int) -> None:
    step, size = 2, 0
    with path.open("w") as log:
        while size < num_bytes:
            step += 1
            text = throughput_line(step, 64.0) + BREAKDOWN if step % every == 0 else OTHER * 4
            size += len(text)
            log.write(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "run.log", Path(folder) / "run.log.gz"
        write_log(plain, 1e9 * options.gigabytes, options.every)
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        for path in (plain, packed):
            start = time.perf_counter()
            scan = scan_log(path, progress=False)
            seconds = time.perf_counter() - start
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            rate = scan.num_bytes / 1e6 / seconds
            print(
                f"{path.name}: {scan.num_bytes / 1e9:.2f} GB in {seconds:.1f} s, {rate:.0f} MB/s, peak {memory:.0f} MiB"
            )


if __name__ == "__main__":
    main()
