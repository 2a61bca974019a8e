"""C++ kernels for CPUs with AMX or AVX-512, compiled on first use, behind one door: `clap_ds.cpu_kernels.patch_model`."""
