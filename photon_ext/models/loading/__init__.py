"""From files to configs and weights: Hugging Face directories, GGUF files, adapters."""
