"""Fast paths: C++ on a CPU, CUDA and Triton kernels on a GPU. Nothing here changes what is computed."""
