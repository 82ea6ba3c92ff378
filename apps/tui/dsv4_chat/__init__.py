"""dsv4-chat: the terminal app for conversations with a model that edgedsv4 runs.

It uses the public names of `edgedsv4` alone. Screens and widgets know a model as the protocol of
`chat_model`, a conversation as the tree of `conversation`, and the disk as `store`; so every screen
is tested with a scripted model, and nothing here loads torch before the model is opened.
"""

__version__ = "0.1.0.dev0"
