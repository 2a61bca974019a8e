"""Tables, plots, comparisons and projections from run records and logs. Imports neither torch nor
DeepSpeed."""
