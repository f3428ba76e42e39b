"""CUDA API calls and copies in steady steps, counted."""
