"""Memory of one training step on a GPU: pure functions of sizes, no torch, no device (README.md beside).

Letters as in the package, and ``t`` ranks of the tensor-parallel group, ``p`` the same with sequence
parallelism and 1 without, ``e`` bytes of a hidden state.
"""
