"""From text to token ids and back: tokenizers, chat templates, vocabularies of grammars."""
