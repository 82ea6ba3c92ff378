"""The `edgedsv4` command: arguments in, text out, no logic of its own."""
