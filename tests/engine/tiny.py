"""A model of one small layer, with random weights in float32."""

import torch

from photon_ext.models.config import Family, ModelConfig
from photon_ext.models.weights import random_weights

CONFIG = ModelConfig(
    family=Family.LLAMA,
    hidden=32,
    layers=1,
    q_heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate=48,
    vocab=512,
    tied_embeddings=True,
)
WEIGHTS = random_weights(CONFIG, torch.float32)
