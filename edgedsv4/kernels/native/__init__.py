"""The operations in C for CPUs; `kernels.h` declares them, `library.py` makes them callable."""
