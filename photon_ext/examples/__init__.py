"""Small programs to read and to copy from: `python -m photon_ext.examples.NAME`.

chat: messages in, an answer out, whole and in pieces. constraints: the answer is one of a few.
own_loop: your model, one row. multi_row: your model, several rows, your cache. paged_scheduler: the
same with pages, shared beginnings and preemption, by a scheduler of your own. ops: single ops.
ray_serve: the HTTP server on many GPUs and machines.
"""
