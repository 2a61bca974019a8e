"""Run C++ kernels on CPUs with AMX or AVX-512, compiled on first use. Entry point:
`clap_ds.cpu_kernels.patch_model`."""
