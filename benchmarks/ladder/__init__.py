"""The ladder from a loop as people write it to ours, one file per stage.

Read ``stock/`` (plain PyTorch) or ``hf/`` (a Hugging Face model) in the order of ``stages.py``.
Every file has a whole loop, ``decode(model, prompt_ids, max_new_tokens, stop_ids)``, greedy, one
sequence, and gives the same tokens. Functions that a stage keeps as they are it imports from the
stage that brought them. The pipeline around a Hugging Face model is an example of the package,
``photon_ext/examples/own_loop.py``.

``python -m benchmarks.adopt`` measures them.
"""
