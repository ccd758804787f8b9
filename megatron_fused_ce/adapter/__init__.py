"""Megatron glue: the only code that knows ``megatron``, and it imports it only once it is there.

``switch`` turns it on; ``import_hook`` waits for Megatron's modules; ``arguments`` adds the flags;
``language_module`` and ``output_layer`` are the two seams in the model, ``deferred_logits`` is what
passes between them; ``main_grad`` is where ``grad_weight`` ends; ``token_weights`` finds the loss mask,
which strategy ``grad_in_forward`` and the accuracy need; ``optimizer_guard`` stops a step for
``grad_in_forward``; ``accuracy`` joins the lm loss in the log; ``stock_path`` lists what is left to Megatron,
and ``report`` tells the user; ``rl_logprobs`` serves Megatron-LM's ``train_rl.py``; ``verl`` and ``skyrl``
serve those stacks, on request. Importing this package imports none of Megatron.
"""
