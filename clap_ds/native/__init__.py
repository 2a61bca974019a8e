"""C++ kernels for CPUs with bf16 matrix units, compiled on first use, behind one door: `clap_ds.native.convert`."""
