"""The C interface: `include/dsv4.h` is its only declaration, everything else here follows it."""
