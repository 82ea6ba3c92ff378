"""The operations of a forward as Triton kernels: static buffers in, static buffers out."""
