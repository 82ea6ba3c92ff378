"""Text in and out: tokenizer, prompt encoding of chat messages, parser of replies."""
