"""Everything a model file says about itself besides its tensors: its shape and its tokenizer.

The readers of the two dialects are in modules of their own; this one is what the rest of the
library imports.
"""

from __future__ import annotations

from edgedsv4.formats.gguf_metadata import config_from_gguf
from edgedsv4.formats.json_metadata import config_from_json
from edgedsv4.formats.tokenizer_spec import TokenizerSpec, tokenizer_spec_from_gguf

__all__ = ["TokenizerSpec", "config_from_gguf", "config_from_json", "tokenizer_spec_from_gguf"]
