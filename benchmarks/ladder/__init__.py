"""The ladder from a Hugging Face model's loop as people write it to ours, one file per stage.

Read ``stages/`` in the order of its ``STAGES``. Every file has a whole loop, ``decode(model,
prompt_ids, max_new_tokens, stop_ids)``, greedy, one sequence, and gives the same tokens. The
pipeline around the model is an example of the package, ``photon_ext/examples/own_loop.py``.

``python -m benchmarks.adopt`` measures them.
"""
