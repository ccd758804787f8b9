"""Cases that run on every rank of a torchrun; tests/test_*.py start them and read their verdicts."""
