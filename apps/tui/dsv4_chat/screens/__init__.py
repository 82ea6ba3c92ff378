"""Screens: the chat, and the dialogs over it, each with a typed result."""
