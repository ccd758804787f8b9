"""The only code that knows ``megatron``, which it imports only after the training script has.

``switch`` turns it on; ``import_hook`` waits for Megatron's modules; ``arguments`` and ``training_arguments``
add the flags; ``language_module`` and ``output_layer`` are the two hook points in the model, between which
``deferred_logits`` are passed, and ``consumer`` knows the code that may have them; ``main_grad`` chooses the
wgrad accumulator; ``token_weights`` finds the loss mask, which strategy ``grad_in_forward`` needs;
``deferred_wgrad`` turns that option of Megatron's off; ``stock_path`` lists the heads and calls that stay
with Megatron, and ``report`` logs them; ``forms`` compares Megatron's functions with the ``known_forms``;
``layout`` checks that Megatron has the patched functions; ``rl_logprobs`` is for Megatron-LM's
``train_rl.py``, and ``output_processor`` for callers of a model by Megatron's contract of that name.
Importing this package imports none of Megatron.
"""
