"""The GPU engine: CUDA graphs, and Triton kernels for a stack of clients."""
