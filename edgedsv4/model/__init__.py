"""The network: weights in, activations out.

Nothing here opens files, starts threads or decides policy; `runtime` does that and calls in.
"""
