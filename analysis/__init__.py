"""From throughput logs to answers: tables, plots, comparisons, cost and projections. Never imports torch or
DeepSpeed."""
