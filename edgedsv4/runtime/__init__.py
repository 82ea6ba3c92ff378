"""Policy and lifetime: engine, sessions, sampling and the memory plan.

The model package computes; this package decides what is computed, when, in how much memory, and
what a failed or cancelled call leaves behind.
"""
