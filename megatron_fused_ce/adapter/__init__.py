"""The only code that knows ``megatron``, which it imports only after the training script has.

``switch`` turns it on, ``arguments`` has the flags, and ``import_hook`` patches Megatron's modules when they
are imported. ``language_module`` has the two hook points in a model: its set-up, which makes its output layer
that of ``output_layer``, and its loss. Between them pass ``deferred_logits`` of a ``layer_call``, from which
``requests`` make a loss without logits, with the wgrad accumulator of ``main_grad`` and the loss mask of
``token_weights``.

``stock_path`` decides what stays with Megatron: by its ``caller``, and by whether Megatron's functions have
one of the forms in ``known_forms.tsv``, which ``forms`` finds out. ``report`` logs it, in lines that ``say``
writes.
``deferred_wgrad`` turns that option of Megatron's off, ``modelopt`` joins the heads of a student and its
teacher, ``rl_logprobs`` is for ``train_rl.py``, and ``output_processor`` for callers of a model by Megatron's
contract of that name.
"""
