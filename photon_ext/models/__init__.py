"""Model families, weights, tokenizers and the decoder that runs them on the photon_ext ops."""
