"""Bytes on disk: what files hold and where, checked before use. No arithmetic on tensors happens here."""
