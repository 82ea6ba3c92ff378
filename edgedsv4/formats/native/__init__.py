"""The compiled part of the file formats: the SIGBUS guard."""
