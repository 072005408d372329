"""Everything that only makes it fast: C++ on a CPU, CUDA and Triton kernels on a GPU. A reader may skip it."""
