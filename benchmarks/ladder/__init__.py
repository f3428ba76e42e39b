"""The ladder from a loop as people write it to ours, one file per stage.

Read ``stock/`` (plain PyTorch) or ``hf/`` (a Hugging Face model) in the order of ``stages.py``.
Every file is a whole loop, ``decode(model, prompt_ids, max_new_tokens, stop_ids)``, greedy, one
sequence, and gives the same tokens. A stage repeats what it keeps from the one before, so that the
difference of two files is the change:

    diff benchmarks/ladder/stock/slots.py benchmarks/ladder/stock/graph.py

``python -m benchmarks.adopt`` measures them.
"""
