"""What an evaluation shows at its end: each metric beside its chance level and its interval, and what it rests on."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from clap_ds.evaluation.result import Evaluation

_TITLES = {"retrieval": "retrieval", "zero_shot": "zero-shot classification"}
_MEASURES = {
    "r1": "R@1",
    "r5": "R@5",
    "r10": "R@10",
    "map10": "mAP@10",
    "top1": "top-1",
    "top5": "top-5",
    "map": "mean average precision",
}
_NAMES_SHOWN = 5


def print_evaluation(evaluation: Evaluation, title: str) -> None:
    """A table of all metrics, in percent."""
    table = Table()
    for name in ("metric", "value", "95 % interval", "chance"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for number, (task, result) in enumerate(evaluation.tasks.items()):
        if number:
            table.add_section()
        counts = ", ".join(f"{count:,} {what}" for what, count in result.counts.items())
        table.add_row(f"{_TITLES[task]} ({counts})", "", "", "", style="bold")
        for name, measure in result.measures.items():
            table.add_row(
                f"  {readable(name, task)}",
                _percent(measure.value),
                f"[{100 * measure.low:.2f}, {100 * measure.high:.2f}]",
                _percent(measure.chance),
            )
    console = Console(width=max(100, Console().width), highlight=False, markup=False)
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)
    if evaluation.broken:
        examples = "; ".join(map(str, evaluation.broken[:_NAMES_SHOWN]))
        console.print(f"{len(evaluation.broken)} broken and left out, the first: {examples}", soft_wrap=True)


def readable(metric: str, task: str) -> str:
    """A metric's name in words: `retrieval_audio_to_text_r1` is audio to text R@1."""
    *words, measure = metric.removeprefix(f"{task}_").split("_")
    return " ".join([*words, _MEASURES[measure]])


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"
