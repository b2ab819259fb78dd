"""The engine: tokens and settings in, tokens and rows out.

It owns the model, the KV cache and the random generators, all on one worker thread. It knows no HTTP,
no JSON and no OpenAI, and imports nothing of the other rooms.

Dimension key, used in every docstring and shape comment of this room: **B** rows in the batch,
**T** tokens of one sequence, **V** ``vocab_size`` (the width of the model's logits row).
"""
