"""The operations of the network, one module each: formula, reference, faster versions.

A public function checks its arguments, then picks an implementation by device and dtype in a
visible `if`. The reference is also the fallback, so every operation runs wherever PyTorch runs.
Nothing here knows layers, files or sessions.
"""
