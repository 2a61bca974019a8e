"""List model presets, and the run configurations that come with this package.

Examples:
    clap-ds presets
    clap-ds bench --config htsat_base   a configuration by its name; a copy of it is a start for your own runs

Presets are values of `clap.model.preset` and of `--preset`. These also take `open_clip:NAME` for
open_clip's CLAP models. They take the path of a JSON like those in `clap_ds/config/presets`, too,
or of a folder or `config.json` of `transformers.ClapModel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clap_ds.config.arguments import make_parser
from clap_ds.utils.errors import run_alone
from clap_ds.utils.paths import CONFIGS

PRESETS = {
    "htsat_tiny_roberta_base": "HTSAT-tiny and RoBERTa-base, as in LAION's scaling runs",
    "htsat_base_roberta_base": "HTSAT-base and RoBERTa-base, as in LAION's scaling runs",
    "htsat_large_roberta_base": "HTSAT-large and RoBERTa-base",
    "htsat_tiny_xlm_roberta_base": "HTSAT-tiny and XLM-RoBERTa-base, for captions in 100 languages",
    "htsat_tiny_multilingual_e5_base": "HTSAT-tiny and multilingual E5-base",
    "htsat_tiny_multilingual_e5_small": "HTSAT-tiny and multilingual E5-small",
    "clap_htsat_tiny_roberta_base": (
        "LAION-CLAP's published models with HTSAT-tiny, such as 630k-audioset-best.pt"
    ),
    "clap_htsat_tiny_roberta_base_fused": (
        "the same with feature fusion for long audio, such as 630k-audioset-fusion-best.pt"
    ),
    "demo": "a small model that learns on a CPU in minutes (`make train-demo`)",
    "micro": "the smallest model, for tests",
}
CONFIGURATIONS = {
    "htsat_tiny": "benchmark: HTSAT-tiny, bf16, synthetic data",
    "htsat_base": "benchmark: HTSAT-base, bf16, synthetic data",
    "htsat_tiny_amp": "benchmark in the published precision: fp32 parameters, bf16 autocast",
    "htsat_base_amp": "the same for HTSAT-base",
    "htsat_tiny_fp16": "benchmark on GPUs without bf16, such as V100",
    "htsat_tiny_deepspeed": "benchmark with DeepSpeed's own optimizer and all-reduce, uncompiled",
    "htsat_tiny_cpu": "benchmark on CPUs",
    "htsat_tiny_shards_cpu": "benchmark on CPUs with shards of real audio",
    "train_demo_cpu": "training of the demo model on synthetic sounds",
    "fine_tune": "a template: training from published weights on your shards",
}


def main(argv: Sequence[str] | None = None) -> None:
    make_parser(__doc__).parse_args(argv)
    print("model presets:")
    print_list(PRESETS)
    print(f"\nrun configurations, in {CONFIGS}:")
    print_list(CONFIGURATIONS)


def print_list(descriptions: Mapping[str, str]) -> None:
    for name, description in descriptions.items():
        print(f"  {name:<36}{description}")


if __name__ == "__main__":
    run_alone(main)
