"""Bytes on disk: what files hold and where, checked before use; no arithmetic on tensors."""
