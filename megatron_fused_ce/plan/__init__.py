"""Memory of one training step on a GPU: pure functions of sizes, without torch or a device.

``setting`` describes model, GPUs and training; ``blocks`` computes the weights and activations of a layer's
parts; ``static`` the weights, gradients and optimizer of a pipeline stage; ``heads`` each way of computing
the loss; ``peaks`` adds them up, moment by moment. ``named_models``, ``megatron_arguments``, ``megatron_log``
and ``launch_script`` turn names, Megatron's arguments, logs and shell scripts into a setting;
``closed_world`` says what of a launch is not counted; ``advice`` compares the ways, ``answer`` has every
sentence that is said;
``report`` shows the result, and ``command`` is ``python -m megatron_fused_ce plan``.

Letters as in the package, and ``t`` ranks of the tensor-parallel group, ``p`` the same with sequence
parallelism and 1 without, ``e`` bytes of a hidden state.
"""
