"""C++ kernels for CPUs with bf16 matrix units (Intel's AMX), compiled on first use."""
